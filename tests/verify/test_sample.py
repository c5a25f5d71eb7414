"""The default sample follows from declarations of kernels, and finds every planted fault."""

import ast
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from syntax import parsed, walk

import arbcli
from arbcli.config.site import SCALE_TYPES
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.sources import kernel_files
from arbcli.verify import check_kernels as verify
from arbcli.verify import parity, variants
from arbcli.verify import sample as sample_module
from arbcli.verify.check_kernels import KERNELS, Checks, _parts, find_kernels
from arbcli.verify.models import (
    FULL_SIZE,
    MODELS,
)
from arbcli.verify.names import sources_of_kernels
from arbcli.verify.registry import BY_NAME
from arbcli.verify.sample import (
    ALWAYS,
    LONG_CASES,
    TELLING,
    CompiledSample,
    is_long,
    sampled_scale_types,
)
from arbcli.verify.subjects import (
    FEW_MODELS,
    INTERPRETED,
    LARGEST,
    RULES,
    SAMPLED_CTX,
    all_subjects,
    sampled_subjects,
)
from arbcli.verify.variants import Launch
from arbcli.verify.verification import Case

CPU = torch.device("cpu")
WITH_SCALES = [spec for spec in KERNELS if spec.uses_scales]

PATHS = {
    "GROUP % 32 == 0", "group_size % PLANE == 0", "160 % GROUP == 0", "group_size == PLANE",
    "GROUP == LANES", "group_size >= 8",
}  # fmt: skip
"""Conditions of code on a group size: each is in the `scale_path` of the kernels that ask it."""
MASKS = {
    "within < GROUP", "group * GROUP < D", "lane % LANES < GROUP",
    "whole * group_size < in_features",
}  # fmt: skip
"""Those where the same code runs for every answer, or `scale_path` has it in other words."""


def test_conditions_on_group_sizes_are_known():
    """Another question belongs in the `scale_path` of the kernels whose code it divides."""
    asked = set()
    for file in kernel_files():
        for function in walk(parsed(file)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in (node for node in walk(function) if isinstance(node, ast.Compare)):
                words = {getattr(part, "id", getattr(part, "attr", "")) for part in walk(node)}
                if words & {"GROUP", "group_size"}:
                    asked.add(ast.unparse(node))
    assert asked == PATHS | MASKS


@pytest.mark.parametrize("spec", WITH_SCALES, ids=lambda spec: spec.name)
def test_every_path_of_a_kernel_is_in_its_sample(spec):
    chosen = sampled_scale_types(spec, SCALE_TYPES)
    assert {*ALWAYS} <= {*chosen} < {*SCALE_TYPES}
    paths = {name: spec.scale_path(size) for name, size in SCALE_TYPES.items()}
    assert {paths[name] for name in chosen} == {*paths.values()}


def test_groups_that_launchers_divide_take_other_paths():
    paths = {spec.name: [spec.scale_path(size) for size in (16, 32, 64)] for spec in WITH_SCALES}
    for name in ("decode_weight", "rms_norm", "decode_e4m3"):
        narrow, plane, _ = paths[name]
        assert narrow != plane
    assert find_kernels(["weighted_rows"])[0].scale_path(4) != paths["weighted_rows"][0]


def test_a_kernel_that_declares_nothing_is_checked_in_every_scale_type():
    (spec,) = find_kernels(["pack_trits"])
    assert sampled_scale_types(spec, SCALE_TYPES) == (*SCALE_TYPES,)


@pytest.mark.parametrize("name", LONG_CASES)
def test_cases_that_are_left_out_are_there_and_others_are_left(name):
    (spec,) = find_kernels([name])
    labels = {c.label: None for size in (32, 6) for c in spec.cases(CPU, size)}
    for pattern in LONG_CASES[name]:
        assert any(fnmatchcase(label, pattern) for label in labels), pattern
    left = [label for label in labels if not is_long(name, label)]
    assert len(left) >= len(labels) / 2


def test_only_triton_is_sampled_and_only_on_request():
    specs = find_kernels(["rms_norm", "pack_trits"])
    args = specs, SCALE_TYPES, CPU, ("interpreter", "torch")
    for checks, kept in ((Checks(sampled=True), {*ALWAYS}), (Checks(), {*SCALE_TYPES})):
        parts = _parts(*args, checks)
        assert {part.scale_type for part in parts} == {*SCALE_TYPES, None}
        assert all("torch" in part.backends for part in parts)
        interpreted = {part.scale_type for part in parts if "interpreter" in part.backends}
        assert interpreted == kept | {None}
    random = _parts(*args, Checks(fuzz=1, sampled=True))
    assert all(part.backends == ("interpreter", "torch") for part in random)


@pytest.mark.parametrize("backend", ["interpreter", "triton"])
def test_models_are_sampled_on_a_gpu_and_in_triton_alone(backend, monkeypatch):
    monkeypatch.setattr(
        "arbcli.verify.subjects.fitting_dtypes", lambda *_: (torch.float32, torch.bfloat16)
    )
    types = ["T32", *(name for name in SCALE_TYPES if name != "T32")]

    def subjects(name):
        return [*all_subjects(CPU, (name,), types)]

    for other in ("torch", "native"):
        assert [*sampled_subjects(subjects(other), types)] == [
            s for s in subjects(other) if s.config.scale_type in ALWAYS or s.parts == ("update",)
        ]
    every, chosen = subjects(backend), [*sampled_subjects(subjects(backend), types)]
    if backend == "triton":
        small = [s for s in every if s.name not in FULL_SIZE]
        kept = [
            replace(s, generally=True)
            for s in small
            if s.config.scale_type in ALWAYS and s.dtype == torch.float32
        ]
        assert [s for s in chosen if s.name not in FULL_SIZE] == kept
        presets = [s for s in chosen if s not in kept]
        assert [s.name for s in presets] == [s for s in FULL_SIZE if s in LARGEST]
        assert {s.dtype for s in presets} == {torch.bfloat16}
        assert 8 < max(s.config.ctx for s in presets) <= SAMPLED_CTX
        on_gpu = [replace(s, device=torch.device("cuda")) for s in subjects("torch")]
        assert [replace(s, device=CPU) for s in sampled_subjects(on_gpu, types)] == [
            s
            for s in subjects("torch")
            if s.parts == ("update",)
            or (s.name.split(" T32")[0] in FEW_MODELS and s.dtype == torch.float32)
        ]
        return
    models = [s.name.split()[0] for s in chosen if s.parts == ("whole",)]
    assert models == ["ragged", *INTERPRETED]
    updated = [s.config.rule_text for s in chosen if s.parts == ("update",)]
    assert updated == [*RULES, "moment+nibble+carry"]
    assert len(models) + len(updated) == len(chosen)


def chosen(monkeypatch, *offers: tuple) -> list[int]:
    """Offer cases that launch kernels, each with these arguments; list which run, by index."""
    names = ("x_ptr", "rows", "HEADS", "WIDE")
    params = [SimpleNamespace(name=name, do_not_specialize=False) for name in names]
    sample = CompiledSample(replace(KERNELS[0], triton=lambda: None))

    def launch(*, dtype=torch.float32, rows=7, warps=4, module="kernels.one", **switches) -> Launch:
        body = SimpleNamespace(__name__=f"_kernel_of_{module}", __module__=module)
        function = SimpleNamespace(fn=body, arg_names=names, params=params)
        arguments = {"x_ptr": torch.empty(64, dtype=dtype), "rows": rows}
        constants = {"HEADS": False, "WIDE": False} | switches
        return Launch(function, (1,), arguments, constants, {"num_warps": warps})

    for index, (label, *launched) in enumerate(offers):

        @contextmanager
        def recorded(record, launched=launched):
            for given in launched:
                record(launch(**given))
            yield

        monkeypatch.setattr(sample_module, "recorded_launches", recorded)
        fixed = not label.startswith("real ")
        part = index if fixed else "real"
        sample.offer(part, label.removeprefix("real "), lambda: None, fixed=fixed)
    sample.choose()
    places = [*sample._offers]
    return sorted(map(places.index, sample.chosen))


def test_each_fact_is_compiled_and_no_combination_of_them(monkeypatch):
    facts = [
        {"rows": 1}, {"rows": 32}, {"HEADS": True}, {"HEADS": 2}, {"HEADS": 8}, {"WIDE": True},
        {"dtype": torch.bfloat16}, {"warps": 8},
    ]  # fmt: skip
    singles = [("2x3", fact) for fact in ({}, *facts)]
    assert chosen(monkeypatch, *singles) == [*range(len(singles))]
    known = [
        {"HEADS": 9}, {"HEADS": 8, "WIDE": True}, {"dtype": torch.bfloat16, "rows": 1},
        {"WIDE": True, "rows": 32},
    ]  # fmt: skip
    found = chosen(monkeypatch, *singles, *(("5x7", combination) for combination in known))
    assert len(found) < len(singles)  # a case that shows two facts stands for two
    met = [(singles + [("", fact) for fact in known])[index][1] for index in found]
    for fact in facts:
        ((name, value),) = fact.items()
        assert any(each.get(name) in {value, 9 if value == 8 else value} for each in met), fact
    assert chosen(monkeypatch, ("2x3", {}), ("5x7 saturated", {"HEADS": 9})) == [0, 1]


def test_a_case_for_which_nothing_further_is_compiled_runs(monkeypatch):
    assert chosen(monkeypatch, ("2x3", {}), ("4x5", {"rows": 9}), ("6x7",)) == [0, 1, 2]
    both = ({"HEADS": 2}, {})
    assert chosen(monkeypatch, ("2x3", *both), ("2x3", {}), ("2x3", {"HEADS": 3}))[:2] == [0, 1]


def test_cases_are_chosen_that_show_most_for_the_least(monkeypatch):
    apart = [{"WIDE": True}, {"rows": 16}, {"dtype": torch.bfloat16}]
    together = {"WIDE": True, "rows": 16, "dtype": torch.bfloat16}
    assert chosen(monkeypatch, ("2x3", *apart), ("2x3", together), ("2x3", {})) == [1, 2]


def test_kernels_that_others_verify_are_not_compiled_in_every_way(monkeypatch):
    helper = {"module": KERNELS[-1].triton.__module__}
    wide = helper | {"WIDE": True}
    assert chosen(monkeypatch, ("2x3", {}, helper), ("2x3", {}, wide)) == [0]
    assert chosen(monkeypatch, ("2x3", helper), ("2x3", wide)) == [0, 1]  # where all are theirs


def test_launchers_are_known_by_the_module_that_declares_their_operation():
    found = {}
    for module, names in sources_of_kernels():
        kernels = module.replace(".verify.kernels.", ".kernels.").replace(".verify.", ".kernels.")
        found |= {n: m for n in names if (m := BY_NAME[n].triton.__module__) != kernels}
    shared = ("gained_rms_norm", "add_gained_rms_norm")
    merged = {"decode_weights": "codec.decode_weights", "merged_steps": "update.merged_steps"}
    assert found == dict.fromkeys(shared, "arbcli.kernels.norm.rms_norm") | {
        name: f"arbcli.verify.kernels.{module}" for name, module in merged.items()
    }


@pytest.mark.parametrize("name", TELLING)
def test_cases_that_find_faults_are_there_and_run_though_others_stand_for_them(name):
    (spec,) = find_kernels([name])
    assert TELLING[name] in {case.label for case in spec.cases(CPU, 6)}
    sample = CompiledSample(spec)
    for label in ("1x1", TELLING[name]):
        sample.offer("part", label, lambda: None)
    sample.choose()
    assert ("part", TELLING[name]) in sample.chosen


def test_a_case_whose_launcher_reads_results_runs():
    sample = CompiledSample(KERNELS[0])
    for label in ("2x3", "4x5"):
        sample.offer("part", label, lambda: torch.empty(0).item())
    sample.choose()
    assert sample.chosen == {("part", "2x3"), ("part", "4x5")}


def test_a_gpu_runs_a_sample_of_cases_and_all_on_request(monkeypatch):
    """Torch has the same; the cases that are left out are counted."""
    (spec,) = find_kernels(["pack_trits"])
    monkeypatch.setattr(verify, "KERNELS", (replace(spec, triton=spec.torch),))
    (part,) = _parts(find_kernels([]), {"T6": 6}, CPU, ("triton", "torch"), Checks(sampled=True))
    labels = [case.label for case in spec.cases(CPU, 6)]

    def choose(sample):
        sample.chosen = {(part, labels[1])}

    monkeypatch.setattr(CompiledSample, "choose", choose)
    for result in verify._verify_parts(spec.name, None, part):
        assert (result.shapes, result.left_out) == ((labels[1],), len(labels) - 1)
    every = _parts(find_kernels([]), {"T6": 6}, CPU, ("triton",), Checks())
    results = [result for share in every for result in verify._verify_parts(spec.name, None, share)]
    assert sorted(label for result in results for label in result.shapes) == sorted(labels)
    assert not any(result.left_out for result in results)


def test_the_interpreter_has_a_case_of_each_kind_in_scale_types_of_further_paths():
    """And all but the long ones in the others."""
    (spec,) = find_kernels(["pack_trits"])
    cases = [Case(label, ()) for label in ("2x3", "4x5", "2x3 zeros", "4x5 zeros")]
    for scale_type, number in ((None, 4), ("T32", 4), ("T6", 4), ("T96", 2)):
        part = verify._Part("", scale_type, 6, "cpu", (), Checks(sampled=True), 0, "cases")
        kinds = set()
        run = [verify._is_chosen(spec, part, case, "interpreter", None, kinds) for case in cases]
        assert (sum(run), run[0], run[2]) == (number, True, True)
        assert verify._is_chosen(spec, part, cases[1], "torch", None, kinds)


def test_kernel_on_a_gpu_is_one_job():
    args = find_kernels(["rms_norm", "unit_rows"]), SCALE_TYPES, CPU, ("triton", "torch")
    shapes = ((256, 256),)
    sampled, whole = Checks(shapes, sampled=True), Checks(shapes)
    jobs = verify._jobs(_parts(*args, sampled), sampled)
    of_gpu = [job for job in jobs if "triton" in job[2].backends]
    assert [job[:2] for job in of_gpu] == [("rms_norm", None), ("unit_rows", None)]
    types = {part.scale_type for part in of_gpu[0][2:]}
    assert {part.scale_type for part in of_gpu[0][2:4]} == {*ALWAYS}
    assert [part.kind for part in of_gpu[0][2:]] == sorted(part.kind for part in of_gpu[0][2:])
    assert types == {*sampled_scale_types(args[0][0], SCALE_TYPES)}
    assert jobs == of_gpu  # torch has the same scale types there
    parts = _parts(*args, whole)
    assert [job[2:] for job in verify._jobs(parts, whole)] == [(part,) for part in parts]


def test_shares_cover_every_compilation_once(monkeypatch):
    """And what is compiled is what a launch would have been given."""
    compiled = []

    @contextmanager
    def replaced(instead):
        for rows in (7, 1, 7, 32, 2, 1):
            instead(SimpleNamespace(run=run), (1,), rows, num_warps=4)
        yield

    def run(*args, **kwargs):
        compiled.append((*args, kwargs))

    monkeypatch.setattr(variants, "replaced_launches", replaced)
    monkeypatch.setattr(variants, "launch_of", lambda _f, _grid, args, _options: args)
    keys = {7: "any", 2: "any", 1: "one", 32: "multiple"}
    monkeypatch.setattr(variants, "variant_of", lambda args: SimpleNamespace(key=keys[args[0]]))
    for index in range(2):
        with variants.compiled_share(index, 2):
            pass
    how = {"grid": (1,), "warmup": True, "num_warps": 4}
    assert compiled == [(7, how), (32, how), (1, how)]


def test_slow_kernels_and_large_models_are_compiled_by_several_processes_first():
    checks, spec = Checks(sampled=True), find_kernels(["decode_e4m3"])
    args = SCALE_TYPES, CPU, ("triton", "torch")
    jobs = verify._jobs(_parts(spec, *args, checks), checks)
    (job,) = jobs
    ahead = [*verify._ahead(job)]
    assert [call[2] for call in ahead] == [*range(verify.SHARES)]
    assert all(call[0] is verify._compile_share and call[3:] == job[2:] for call in ahead)
    assert verify._turn(job) == verify.FIRST_CHECKS < parity.AHEAD
    (quick, *_) = verify._jobs(_parts(find_kernels(["step_scales"]), *args, checks), checks)
    assert parity.AHEAD < verify._turn(quick) == verify.LAST_CHECKS < parity.LAST
    subjects = [s for s in all_subjects(CPU, ("torch",), ["T32"]) if s.name == "graph T32"]
    assert [*parity._ahead(("graph T32", "torch", subjects[0]))] == []
    (*_, last) = parity._ahead(("graph T32", "triton", subjects[0]))
    assert last[1:] == ("graph T32", parity.SHARES - 1, subjects[0])
    names = {name.split(" T")[0] for name in (*MODELS, *FULL_SIZE)}
    assert {*parity.OF_MANY_KERNELS} <= names


def test_references_run_on_the_host_with_a_gpu(monkeypatch):
    """But for real matrices, and large cases of kernels that have a reference for these."""
    called, places = [], []
    small, large = (Case("", (torch.zeros(n),)) for n in (3, verify.LARGE + 1))
    spec = SimpleNamespace(name="", large_reference=lambda x: called.append("large") or x)
    monkeypatch.setattr(verify, "_moved", lambda x, place: places.append(place.type) or x)
    for device, kind, case in (
        ("cpu", "cases", small), ("cuda", "cases", small), ("cuda", "real", small),
        ("cuda", "cases", large), ("cpu", "cases", large),
    ):  # fmt: skip
        part = verify._Part(spec.name, "T6", 6, device, ("torch",), Checks(), 0, kind)
        verify._expected(spec, part, case, lambda x: called.append("small") or x)
    assert called == [*["small"] * 3, "large", "small"]
    assert places == ["cpu"] * 2  # and results are compared there


def test_documents_list_the_sampled_cases():
    text = (Path(arbcli.__file__).parents[1] / "docs" / "commands.md").read_text()
    listed = text.partition("`--exhaustive` checks all")[2].partition("- `--fuzz")[0]
    names = {
        *ALWAYS,
        *FEW_MODELS,
        *(name.split()[0] for name in LARGEST),
    }
    assert {name for name in names if f"`{name}`" not in listed} == set()
    assert f"up to {SAMPLED_CTX} bytes" in listed.replace("\n    ", " ")


def test_inputs_are_moved_with_all_that_they_are_made_of():
    packed = Packed(torch.zeros(2, 3), torch.zeros(2, 1), None, 5, 6)
    (again, number), meta = verify._moved((packed, 4), torch.device("meta")), torch.device("meta")
    assert (again.trits.device, again.fraction, again.group_size, number) == (meta, None, 6, 4)
    assert verify._size((packed, 4, torch.zeros(7))) == 6 + 2 + 7


def test_one_matrix_of_each_order_of_magnitude_is_drawn(monkeypatch):
    """Cases that do not run are counted as left out."""
    (spec,), drawn = find_kernels(["pack_trits"]), []
    monkeypatch.setattr(verify, "KERNELS", (replace(spec, triton=spec.torch),))
    real = verify.real_cases

    def cases(*args, **kwargs):
        for case in real(*args, **kwargs):
            drawn.append(case.label)
            yield case

    monkeypatch.setattr(verify, "real_cases", cases)
    shapes = ((10, 20), (11, 20), (12, 20), (10, 200), (11, 200))
    checks = Checks(shapes, sampled=True)
    *_, part = _parts(find_kernels([]), {"T6": 6}, CPU, ("triton", "torch"), checks)
    monkeypatch.setattr(CompiledSample, "choose", lambda self: self.chosen.add((part, "10x200")))
    (result,) = verify._verify_parts(spec.name, None, part)
    assert drawn == ["10x20", "10x200", "10x200"]
    assert (result.shapes, result.left_out) == (("10x200",), len(shapes) - 1)


def test_one_real_matrix_of_each_order_of_magnitude_runs(monkeypatch):
    """And one for each further fact."""
    real = ["64x256", "64x768", "64x2048 bf16", "64x5632"]
    offers = [("2x3", {}), *((f"real {label}", {"rows": 9}) for label in real)]
    assert chosen(monkeypatch, *offers) == [0, 1, 3]
    offers.append(("real 1x1", {"warps": 8}))
    assert chosen(monkeypatch, *offers)[-1] == 5


@pytest.mark.parametrize(
    ("value", "multiple"),
    [(32, True), (8, False), (True, False), (1.0, False),
     (torch.zeros(99), True), (torch.zeros(99)[4:], True), (torch.zeros(99)[2:], False),
     (torch.zeros(99, dtype=torch.bfloat16)[8:], True),
     (torch.zeros(99, dtype=torch.bfloat16)[4:], False),
     (torch.zeros(99, dtype=torch.int8)[16:], True),
     (torch.zeros(99, dtype=torch.int8)[8:], False)],
)  # fmt: skip
def test_address_is_a_multiple_by_its_bytes(value, multiple):
    assert variants._is_multiple(value) == multiple

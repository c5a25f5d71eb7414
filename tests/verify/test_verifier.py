"""The verifier by itself: a fault put into any of its stages comes out, and so does what it skips.

Each stage is replaced by one that finds what it is told, so that only the way from there to the
verdict is tested; that kernels and models are checked rightly is tested elsewhere.
"""

import json
import os
import sys
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from arbcli import cli
from arbcli.config.site import SCALE_TYPES
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.backend import chunk_elements
from arbcli.verify import check_kernels as verify_module
from arbcli.verify import run as stages
from arbcli.verify import workers as workers_module
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.check_kernels import Checks, verify_kernels
from arbcli.verify.compare import poisoned
from arbcli.verify.compile_ahead import CompileResult
from arbcli.verify.fuzz import TILES, Drawn, Tally, fuzz_cases
from arbcli.verify.kernels.codec.packing import pack_trits_verification
from arbcli.verify.ledger import ledger_page, new_ledger
from arbcli.verify.parity import CHECKS, _rotary
from arbcli.verify.registry import KERNELS
from arbcli.verify.run import VerifyRequest, verify
from arbcli.verify.verification import Case
from arbcli.verify.workers import Workers

CPU = torch.device("cpu")
(RIGHT,) = verify_kernels(["pack_trits"], {"T32": 32}, CPU, ["torch"]).kernels
PARITY = next(iter(_rotary(CPU)))
COMPILED = CompileResult("pack_trits", "sm_90", 2, 40, 0, 1024, passed=True, error=None)


def off_by_one(trits):
    return pack_trits_verification.torch(trits) + 1


@pytest.fixture
def small(monkeypatch):
    """Leave one kernel, no other processes, and stages that find that all is well."""
    monkeypatch.setattr(verify_module, "KERNELS", (pack_trits_verification,))
    monkeypatch.setattr(stages, "_num_workers", lambda _: 1)
    monkeypatch.setattr(stages, "begin_parity", lambda *_, **__: lambda: (PARITY,))
    monkeypatch.setattr(stages, "find_targets", lambda _: ["sm_90"])
    monkeypatch.setattr(stages, "compile_kernels", lambda *_: (COMPILED,))
    return monkeypatch


WHOLE = VerifyRequest(backend="torch", device="cpu", targets="sm_90")


def break_kernel(patch):
    patch.setattr(verify_module, "KERNELS", (replace(pack_trits_verification, torch=off_by_one),))


def break_parity(patch):
    patch.setattr(
        stages, "begin_parity", lambda *_, **__: lambda: (PARITY, replace(PARITY, passed=False))
    )


def break_compiled(patch):
    spilled = replace(COMPILED, kernel="rms_norm", passed=False, error="64 bytes spill")
    patch.setattr(stages, "compile_kernels", lambda *_: (COMPILED, spilled))


BREAKS = {
    break_kernel: "integer state",
    break_parity: "rotary tables",
    break_compiled: "do not compile",
}


def test_nothing_wrong_passes(small):
    found = verify(WHOLE)
    assert found.passed
    assert not found.failures
    for what in BREAKS.values():
        assert sum(what in item for item in found.ruled_out) == 1


@pytest.mark.parametrize("break_", BREAKS, ids=lambda break_: break_.__name__)
def test_one_fault_in_any_stage_fails_the_whole(break_, small):
    """It fails, on the page and in the exit code, and what it casts doubt on is not excluded."""
    break_(small)
    found = verify(WHOLE)
    assert not found.passed
    assert len({failure.item for failure in found.failures}) == 1
    assert "FAILED" in ledger_page(found)
    ruled_out = {what: any(what in item for item in found.ruled_out) for what in BREAKS.values()}
    assert ruled_out == {what: what != BREAKS[break_] for what in BREAKS.values()}
    arguments = ["verify-kernels", "--backend", "torch", "--device", "cpu", "--targets", "sm_90"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert json.loads(result.stdout)["passed"] is False


@pytest.mark.parametrize("check", CHECKS)
def test_one_failure_of_a_check_of_the_model_is_enough(check):
    """Neither does a pass elsewhere excuse it, nor does one comparison stand for all."""
    right = replace(PARITY, check=check)
    parts = (right, replace(right, passed=False), right)
    ledgers = [new_ledger(CPU, ["T32"], (RIGHT,), of, (), (), 1.0) for of in ((right,) * 3, parts)]
    assert [ledger.passed for ledger in ledgers] == [True, False]
    excluded = set(ledgers[0].ruled_out) - set(ledgers[1].ruled_out)
    assert len(excluded) == 1
    assert excluded.pop().endswith(": 3 comparisons")


@pytest.mark.parametrize(
    ("change", "what"),
    [({"unequal": 1, "passed": False}, "integer state"),
     ({"unwritten": 1, "passed": False}, "left unwritten"),
     ({"kind": "fuzz", "passed": False}, "strides or offsets")],
    ids=str,
)  # fmt: skip
def test_one_kernel_that_fails_is_enough(change, what):
    drawn = draw("pack_trits", 12)[0] if change.get("kind") == "fuzz" else None
    other = replace(RIGHT, kernel="other", kind=change.get("kind", "cases"), drawn=drawn)
    wrong = replace(RIGHT, drawn=drawn, **change)
    for kernels in ((other, other), (other, wrong), (wrong,)):
        found = new_ledger(CPU, ["T32"], kernels, (), (), (), 1.0)
        passed = kernels == (other, other)
        assert any(what in item for item in found.ruled_out) == passed


@pytest.mark.parametrize("place", [0, 1, 2])
def test_parts_of_a_kernel_are_put_together_by_the_worst(place):
    """Each figure of a part counts, wherever the part is; kinds and backends stay apart."""
    failure = verify_module.CaseResult("bad", 7, 2, 3, None, None, 0.5, False)
    figures = {"shapes": ("bad",), "outputs": 5, "elements": 11, "unwritten": 2, "unequal": 3,
               "max_error": None, "relative_error": 0.25, "cosine": 0.5, "seconds": 4.0,
               "passed": False, "failures": (failure,)}  # fmt: skip
    right = replace(RIGHT, seconds=1.0)
    parts = [right, right, right]
    parts[place] = replace(right, **figures)
    others = replace(right, kind="fuzz"), replace(right, backend="native")
    found = verify_module._merged([others[0], *parts, others[1]])
    assert [found[0], found[2]] == [*others]
    shapes = [shape for part in parts for shape in part.shapes]
    assert found[1] == replace(
        right, **figures | {
            "shapes": tuple(shapes), "outputs": 2 * right.outputs + 5,
            "elements": 2 * right.elements + 11, "seconds": 6.0,
        },
    )  # fmt: skip


def test_shares_of_cases_are_all_of_them_however_they_end(monkeypatch):
    """On a GPU the cases of a kernel are dealt out; each is checked once, and all are told of."""
    places = {"triton": [("cases", (share, 4)) for share in range(4)], "torch": [("cases", (0, 1))]}
    for backend, wanted in places.items():
        found = verify_module._shares(pack_trits_verification, (backend, "torch"), Checks(), None)
        assert list(found) == wanted
    monkeypatch.setattr(verify_module, "_shares", lambda *_: iter(places["triton"]))
    end_in_order(monkeypatch, [2, 0, 3, 1])
    told, workers = [], Workers(2)
    args = ["pack_trits"], {"T32": 32}, CPU, ["torch"]
    report = verify_kernels(*args, workers=workers, progress=told.append)
    (result,) = report.kernels
    assert sorted(result.shapes) == sorted(RIGHT.shapes)
    assert (result.outputs, result.elements) == (RIGHT.outputs, RIGHT.elements)
    assert result.shapes[: len(RIGHT.shapes[::4])] == RIGHT.shapes[::4]
    assert [(job.number, job.total, job.result) for job in told] == [(1, 1, [result])]


def test_interrupted_run_does_not_pass(small):
    assert not new_ledger(CPU, ["T32"], (RIGHT,), (), (), (), 1.0, interrupted="SIGINT").passed


@pytest.mark.parametrize("stage", ["begin_kernels", "begin_parity", "compile_kernels"])
def test_unexpected_error_of_a_stage_ends_the_program_with_2(stage, small, capsys):
    def fail(*_, **__):
        raise RuntimeError("not foreseen")

    small.setattr(stages, stage, fail)
    arguments = ["verify-kernels", "--backend", "torch", "--device", "cpu", "--targets", "sm_90"]
    small.setattr(sys, "argv", ["arb", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "RuntimeError: not foreseen" in capsys.readouterr().err


def end_in_order(patch: pytest.MonkeyPatch, order: list[int]) -> None:
    """Let jobs of workers end one after another, as they are counted over all batches."""
    counted: dict[Future, int] = {}

    def submit(_, jobs):
        futures = {}
        for batch, index in jobs:
            future = Future()
            future.set_result(batch.function(*batch.jobs[index]))
            futures[future], counted[future] = (batch, index), len(counted)
        return futures

    def first(running, **_):
        return SimpleNamespace(done=[min(running, key=lambda f: order.index(counted[f]))])

    patch.setattr(Workers, "_submit", submit)
    patch.setattr(workers_module, "wait", first)


def negated(number: int) -> int:
    return -number


def fail_second(number: int) -> int:
    if number == 2:
        raise RuntimeError("not foreseen")
    return number


def test_error_of_one_job_is_not_lost():
    with pytest.raises(RuntimeError, match="not foreseen"), Workers(1) as workers:
        workers.map(fail_second, [(1,), (2,), (3,)])


@pytest.mark.parametrize("number", [1, 2])
def test_batches_share_a_queue(number, monkeypatch):
    """The first job that is waited for may be done later, and no job is done twice."""
    end_in_order(monkeypatch, [2, 1, 0, 3])
    told, workers = [], Workers(number)
    begun = [workers.begin(negated, [(i,), (i + 1,)], told.append) for i in (0, 2)]
    assert [workers.finish(batch) for batch in begun] == [[0, -1], [-2, -3]]
    jobs = [(job.number, job.total, job.arguments) for job in told]
    assert sorted(jobs, key=lambda job: job[2]) == [
        (2 if number > 1 else 1, 2, (0,)), (1 if number > 1 else 2, 2, (1,)),
        (1, 2, (2,)), (2, 2, (3,)),
    ]  # fmt: skip
    if number > 1:
        assert [job.arguments[0] for job in told] == [2, 1, 0, 3]


def test_jobs_of_a_lesser_turn_are_begun_first(monkeypatch):
    end_in_order(monkeypatch, [0, 1, 2, 3])
    told, workers = [], Workers(2)
    late = workers.begin(negated, [(0,), (1,)], told.append, turn=lambda job: job[0])
    soon = workers.begin(negated, [(2,), (3,)], told.append, turn=lambda job: 2 - job[0])
    assert (workers.finish(late), workers.finish(soon)) == ([0, -1], [-2, -3])
    assert [job.arguments[0] for job in told] == [3, 0, 2, 1]


SKIPPED = {
    "the compiled kernels": {"backend": "torch"}, "bfloat16 in the kernels": {"backend": "torch"},
    "the real sizes of the presets": {"backend": "torch"},
    "the native backend": {"backend": "torch"}, "the torch backend": {"backend": "interpreter"},
    "other kernels, and the whole model": {"names": ("pack_trits",)},
    "the fixed cases, and the whole model": {"fuzz": 1}, "blocks of a preset after its second": {},
    "causality and determinism of small models": {}, "Mamba in bf16": {},
    "small models but those of graph, hnet, compressed": {"backend": "interpreter"},
    "scale types T4, T6, ": {}, "compilation for other GPUs": {"targets": None},
    "whether kernels run on the GPUs": {"targets": "sm_90"},
    "presets without codebooks from the bytes on": {}, "float baselines and their optimizers": {},
    "speed": {},
}  # fmt: skip
"""Parts that a request leaves out, by the beginning of how the ledger says so."""


@pytest.mark.parametrize("what", SKIPPED)
def test_skipped_checks_are_listed_once(what, small):
    small.setattr(
        stages, "begin_kernels", lambda *_: lambda: verify_module.VerifyReport((), 0.0, True)
    )
    request = replace(WHOLE, **SKIPPED[what])
    listed = verify(request).not_verified
    assert sum(item.startswith(what) for item in listed) == 1, listed


def test_errors_that_no_check_can_detect_are_listed():
    request = VerifyRequest(backend="torch", device="cpu")
    items = [f"{spec.name}: {item}" for spec in KERNELS for item in spec.not_verified]
    assert list(stages._of_kernels(request)) == items


def test_each_random_case_has_a_seed_of_its_own(monkeypatch):
    report = verify_kernels(["step_scales"], {"T6": 6}, CPU, ["torch"], Checks(fuzz=4, seed=7))
    (result,) = report.kernels
    seeds, drawn = zip(*(label.split(":", 1) for label in result.shapes), strict=True)
    assert seeds == ("seed 7", "seed 8", "seed 9", "seed 10")
    assert len(set(drawn)) == 4


def draw(name: str, seeds: int) -> tuple[Drawn, list[str]]:
    """Draw random cases; give what is counted of them, and their labels without the seed."""
    tally, labels = Tally(name), []
    for case in fuzz_cases(name, CPU, 6, range(seeds)):
        tally.add(case)
        labels.append(case.label.split(":", 1)[1])
    return tally.drawn(), labels


def test_random_sizes_are_on_both_sides_of_every_boundary():
    sizes = {CaseGenerator(seed, CPU).near(TILES) for seed in range(600)}
    assert sizes == {1, 2, 3, 5} | {tile + by for tile in TILES for by in (-1, 0, 1)}


def test_facts_of_drawn_cases_are_read_from_the_inputs():
    tally, bytes_ = Tally("rms_norm"), torch.full((3, 4), -96, dtype=torch.int8)
    x = torch.zeros(8, 8)
    packed = Packed(bytes_.view(torch.uint8), bytes_, None, 20, 6)
    tally.add(Case("", (x, packed, 1e-6)))
    tally.add(Case("", (x[:, ::2], None, 1e-6), chunk_elements=5))
    tally.add(Case("", (x.flatten()[1:33].view(4, 8), None, 1e-6)))
    assert tally.drawn() == Drawn(
        cases=3, elements=(32, 64), dtypes={"float32": 3, "int8": 1, "uint8": 1},
        group_sizes={"6": 1}, strided=1, offset=1, saturated=1, in_parts=1, never=(),
    )  # fmt: skip
    zeros = Tally("rms_norm")
    zeros.add(Case("", (x, packed._replace(exponent=0 * bytes_, trits=x.to(torch.uint8)), 1e-6)))
    assert zeros.drawn().never == ("in parts", "strided", "offset", "saturated")


LOADED = {
    "strided": ("view", lambda self, values: values),
    "offset": ("view", lambda self, values: values),
    "saturated": ("chance", lambda self, share: share not in (0.15, 0.1) and self.below(2) == 1),
    "in parts": ("pick", lambda self, choices: choices[-1 if None not in choices else 0]),
}
"""Generators that never draw something: which of their methods is another."""


@pytest.mark.parametrize("what", LOADED)
def test_random_cases_that_were_never_drawn_are_listed(what, monkeypatch):
    monkeypatch.setattr(CaseGenerator, *LOADED[what])
    request = VerifyRequest(names=("step_scales",), fuzz=12, seed=1, backend="torch", device="cpu")
    found = verify(request)
    begin = f"random cases, {what}: none was drawn of step_scales"
    assert begin in found.not_verified
    independent = any("strides or offsets" in item for item in found.ruled_out)
    assert independent == (what in ("saturated", "in parts"))


def test_torch_backend_works_on_random_cases_in_the_parts_that_were_drawn(monkeypatch):
    seen = []

    def noted(trits):
        seen.append(chunk_elements(-1))
        return pack_trits_verification.torch(trits)

    monkeypatch.setattr(verify_module, "KERNELS", (replace(pack_trits_verification, torch=noted),))
    verify_kernels([], {"T32": 32}, CPU, ["torch"], Checks(fuzz=9))
    cases = fuzz_cases("pack_trits", CPU, 32, range(9))
    assert seen == [-1 if case.chunk_elements is None else case.chunk_elements for case in cases]
    assert {-1, 1} < set(seen)


@pytest.fixture
def plain_memory(poison_uninitialised_memory):
    """Take back what every other test has: memory that is poisoned before the verifier comes."""
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = False


@pytest.mark.parametrize("fuzz", [0, 2])
def test_verifier_poisons_memory_by_itself(fuzz, plain_memory, monkeypatch):
    seen = []

    def lazy(trits):
        seen.append(torch.empty(4).isnan().all().item())
        return torch.empty_like(pack_trits_verification.torch(trits))

    monkeypatch.setattr(verify_module, "KERNELS", (replace(pack_trits_verification, torch=lazy),))
    report = verify_kernels([], {"T32": 32}, CPU, ["torch"], Checks(fuzz=fuzz))
    assert seen
    assert all(seen)
    assert report.kernels[0].unwritten == report.kernels[0].elements > 0


def test_memory_is_poisoned_inside_only(plain_memory):
    for _ in range(2):
        with poisoned():
            assert torch.empty(3).isnan().all()
            assert (torch.empty(3, dtype=torch.int8) == 127).all()
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_labels_of_cases_are_unique(spec):
    labels = [case.label for case in spec.cases(CPU, SCALE_TYPES["T32"])]
    assert len(set(labels)) == len(labels)


def test_every_case_is_run_on_every_backend(monkeypatch):
    runs = []

    def counted(trits):
        runs.append(trits.shape)
        return pack_trits_verification.torch(trits)

    monkeypatch.setattr(
        verify_module, "KERNELS", (replace(pack_trits_verification, torch=counted),)
    )
    (result,) = verify_kernels([], {"T32": 32}, CPU, ["torch"]).kernels
    assert len(runs) == len(result.shapes) == len([*pack_trits_verification.cases(CPU, 32)])
    assert result.outputs == len(runs)


@pytest.mark.parametrize(("scale_type", "group_size"), [("T6", 6), (None, 32), ("T128", 128)])
def test_kernels_are_compiled_and_timed_with_the_requested_scales(
    scale_type, group_size, monkeypatch
):
    found = SimpleNamespace(kernels=(), parity=(), compiled=(), timing=None)
    asked = {name: mock.Mock(return_value=()) for name in ("compile_kernels", "time_kernels")}
    asked["begin_kernels"] = mock.Mock(return_value=lambda: SimpleNamespace(kernels=["result"]))
    for name, called in asked.items():
        monkeypatch.setattr(stages, name, called)
    monkeypatch.setattr(stages, "Stopwatch", lambda device: f"watch of {device}")
    about = {"targets": "sm_90", "timed": True, "fuzz": 3, "seed": 5}
    request = VerifyRequest(names=("rms_norm",), scale_type=scale_type, **about)
    device, backends = torch.device("cuda"), ("triton", "torch")
    stages._check(request, device, backends, ["sm_90"], found, lambda line: None)
    names, group_sizes, place, on, checks, workers, *_ = asked["begin_kernels"].call_args.args
    assert (names, place, on) == (("rms_norm",), device, backends)
    assert group_sizes == request.scale_types
    assert (checks.fuzz, checks.seed, workers.number) == (3, 5, 1)
    kernels, stopwatch, size, _ = asked["time_kernels"].call_args.args
    assert (kernels, stopwatch, size) == (["result"], "watch of cuda", group_size)
    names, targets, size, number, _ = asked["compile_kernels"].call_args.args
    assert (names, targets, size) == (("rms_norm",), ["sm_90"], group_size)
    assert number == (os.cpu_count() or 1)
    assert found.parity == ()  # kernels were named


def test_model_is_compared_in_every_requested_scale_type_and_backend(small):
    compared = mock.Mock(return_value=lambda: (PARITY,))
    small.setattr(stages, "begin_parity", compared)
    verify(VerifyRequest(device="cpu", scale_type=None))
    device, backends, group_sizes, *_ = compared.call_args.args
    assert (device, backends, group_sizes) == (CPU, stages._backends(CPU), SCALE_TYPES)


@pytest.mark.parametrize(("cores", "free", "number"), [
    (8, None, 8), (8, 100 << 32, 8), (64, 100 << 32, 32), (64, 5 << 32, 5), (64, 1, 1),
])  # fmt: skip
def test_as_many_processes_check_as_there_are_cores_and_memory_for(
    cores, free, number, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * (free or 0)))
    device = torch.device("cpu" if free is None else "cuda")
    assert stages._num_workers(device) == number
    monkeypatch.setattr(stages, "HAS_TRITON", False)
    assert not {"triton", "interpreter"} & {*stages._backends(device)}

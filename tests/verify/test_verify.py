"""The verifier: wrong kernels fail, poison shows, and the random cases can be drawn again."""

import math
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from checked import checked, has_one_layout
from torch.utils._pytree import tree_leaves

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import chunk_elements
from arbcli.verify import check_kernels as verify
from arbcli.verify.cases import random_cases
from arbcli.verify.check_kernels import CompiledCases, copies, kernel_jobs
from arbcli.verify.compare import compare, errors, worst
from arbcli.verify.kernels.codec.packing import pack_trits_verification
from arbcli.verify.kernels.norm.rms_norm import rms_norm_verification
from arbcli.verify.registry import BY_NAME, KERNELS
from arbcli.verify.scale_types import ALWAYS
from arbcli.verify.variants import Launch
from arbcli.verify.verification import DRAWS, TILES, CaseGenerator, Gate

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"
T6 = {"T6": 6}
CPU = torch.device("cpu")


def verify_planted(monkeypatch, spec, device):
    monkeypatch.setattr(verify, "KERNELS", (spec,))
    (result,) = checked([], T6, device, [KERNEL_BACKEND])
    return result


def pack_wrongly(trits):
    return pack_trits_verification.triton(trits) + 1


def test_wrong_kernel_fails_with_its_cases(monkeypatch, device):
    result = verify_planted(
        monkeypatch, replace(pack_trits_verification, triton=pack_wrongly), device
    )
    assert not result.passed
    assert result.unequal == result.elements > 0
    labels = [failure.label.partition(":")[0] for failure in result.failures]
    assert labels[:DRAWS] == [f"seed {seed}" for seed in range(DRAWS)]


def test_kernel_that_raises_fails_its_cases_only(monkeypatch, device):
    def picky(trits):
        if not len(trits):
            raise RuntimeError("no\nsuch shape")
        return pack_trits_verification.triton(trits)

    result = verify_planted(monkeypatch, replace(pack_trits_verification, triton=picky), device)
    failures = {failure.label: failure.error for failure in result.failures}
    assert failures == {f"empty {seed}: 17x165": "RuntimeError: no" for seed in range(2)}


def test_kernels_are_given_the_strides_and_the_memory_of_their_cases():
    """A copy that is contiguous would be another case than the one that is told of."""
    base = torch.arange(70, dtype=torch.float32).view(7, 10)
    packed = pack_trits_verification.torch(torch.ones(4, 12, dtype=torch.int8))
    strided = Packed(packed[1::2], *torch.ones(2, 2, 4, dtype=torch.int8)[:, :, ::2], 12, 6)
    inputs = base[1::2, 2::3], base.T[3:], base[2:3].expand(5, -1), strided, 3
    copied = copies(inputs)
    for one, other in zip((*inputs[:3], *strided[:3]), (*copied[:3], *copied[3][:3]), strict=True):
        assert torch.equal(one, other)
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert one.data_ptr() != other.data_ptr()
    assert copied[4] == 3


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_loops_in_c_are_verified_with_torch_where_there_are_any():
    for name, backends in (("step_scales", ["torch", "native"]), ("pack_trits", ["torch"])):
        results = checked([name], T6, CPU, ["torch", "native"])
        assert [result.backend for result in results] == backends
    (alone,) = checked(["pack_trits"], T6, CPU, ["native"])
    assert (alone.backend, alone.passed) == ("native", True)


SLOW = {
    "weighted_rows", "weighted_rows_grad", "weighted_rows_grad_weights", "row_matmul",
    "prepacked_rows",
}  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=[pytest.mark.slow] if spec.name in SLOW else []) for spec in KERNELS],
    ids=lambda spec: spec.name,
)
def test_random_cases_pass(spec, device):
    results = checked([spec.name], T6, device, [KERNEL_BACKEND, "torch"], fuzz=1, seed=11)
    assert all(result.passed for result in results), results


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_random_case_is_drawn_again_from_its_seed(spec, device):
    (one,), (other,) = (list(random_cases(spec, device, 6, [5])) for _ in range(2))
    assert one.label == other.label
    for leaf, again in zip(tree_leaves(one.inputs), tree_leaves(other.inputs), strict=True):
        if isinstance(leaf, torch.Tensor):
            exact = {"rtol": 0, "atol": 0, "equal_nan": True, "check_stride": True}
            torch.testing.assert_close(leaf, again, **exact)
        else:
            assert leaf == again


def close(relative: float, peer_slack: float = 0.0):
    return replace(rms_norm_verification, gate=Gate(relative=relative, peer_slack=peer_slack))


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_no_implementation_is_excused_by_being_its_own_peer(spec):
    """The torch backend is the peer of many kernels, and compared itself."""
    wanted = torch.linspace(1, 2, 50, dtype=torch.float64)
    assert not compare(spec, "", 1.02 * wanted, wanted, 1.02 * wanted).passed


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_no_reference_calls_its_own_kernel(spec):
    """Not in part either, but for what selects the results that are compared."""
    implementations = [spec.triton, spec.torch, spec.native]
    implementations = {code for run in implementations if run for code in codes(run)}
    called = set()
    case = next(spec.cases(torch.device("cpu"), 6))
    for reference in filter(None, (spec.reference, spec.large_reference)):
        selected = codes(reference) | codes(spec.compared)
        sys.setprofile(lambda frame, event, _: event == "call" and called.add(frame.f_code))
        try:
            reference(*copies(case.inputs))
        finally:
            sys.setprofile(None)
        assert not called & (implementations - selected)


def codes(run: object) -> set:
    """Find the code of a function, and of those that it wraps."""
    run = run.func if isinstance(run, partial) else run
    if not hasattr(run, "__code__"):
        return set()
    wrapped = [cell.cell_contents for cell in run.__closure__ or ()]
    return {run.__code__}.union(*map(codes, wrapped))


def test_errors_are_relative_to_the_reference_its_terms_or_a_peer():
    """2 against 4 is half of it, and 4 against 2 is all of it."""
    small, large = torch.full((9,), 2.0), torch.full((9,), 4.0)
    ones, sums, terms = (torch.tensor(x).double() for x in ([1.0] * 50, [1e-6], [0.6, -0.8]))
    strict = close(1e-9, 0.1)
    for spec, got, wanted, others, passed in (
        (close(0.51), small, large, (), True), (close(0.49), small, large, (), False),
        (close(0.51), large, small, (), False),
        # a peer and its slack are the bar
        (strict, ones + 1.05e-3, ones, (ones + 1e-3,), True),
        (strict, ones + 1.15e-3, ones, (ones + 1e-3,), False),
        (strict, ones + 1.05e-3, ones, (), False),
        # of a sum that cancels, terms are
        (close(1e-3), sums + 0.9e-3, sums, (None, terms), True),
        (close(1e-3), sums + 1.1e-3, sums, (None, terms), False),
        (close(1e-3), sums + 0.9e-3, sums, (), False),
        (strict, sums + 1.1e-3, sums, (sums + 1e-3, terms), True),
        # a peer excuses no more than a share of the terms, either
        (strict, sums + 0.02, sums, (sums + 0.02, terms), False),
    ):  # fmt: skip
        assert compare(spec, "", got, wanted, *others).passed == passed


def test_random_sizes_are_on_both_sides_of_every_boundary():
    sizes = {CaseGenerator(seed, CPU).size(TILES) for seed in range(600)}
    assert sizes == {1, 2, 3, 5} | {tile + by for tile in TILES for by in (-1, 0, 1)}


def test_random_cases_have_all_layouts_and_states():
    """Of each kernel that can have them: strides, offsets, equal bytes, and work in parts."""
    for spec in KERNELS:
        cases = [*random_cases(spec, CPU, 6, range(12))]
        inputs = tree_leaves([case.inputs for case in cases])
        tensors = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        if not has_one_layout(spec):
            assert any(not tensor.is_contiguous() for tensor in tensors), spec.name
            assert any(tensor.storage_offset() for tensor in tensors), spec.name
        assert {case.chunk_elements is None for case in cases} == {True, False}


def test_only_the_interpreter_leaves_out_scale_types_and_only_on_request():
    args = ["embedding_rows", "pack_trits"], SCALE_TYPES, CPU, ("interpreter", "torch")
    for sampled, kept in ((True, {*ALWAYS}), (False, {*SCALE_TYPES})):
        jobs = kernel_jobs(*args, sampled=sampled)
        assert {name for job in jobs for name in job.group_sizes} == {*SCALE_TYPES, None}
        assert all("torch" in job.backends for job in jobs)
        interpreted = [job for job in jobs if "interpreter" in job.backends]
        assert {name for job in interpreted for name in job.group_sizes} == kept | {None}


def test_cases_are_drawn_with_special_sizes_and_values_among_them():
    spec = BY_NAME["dropout"]
    cases = {case.label: case.inputs for case in spec.cases(CPU, 32)}
    assert len(cases) == DRAWS + len(spec.shapes) + 2 * len(spec.changed)
    assert cases["0x1x7"][0].shape == (0, 7)
    x, _, rate = cases["almost all 1: 9x17x165"]
    assert (x.shape, rate) == ((9, 165), 0.999999)
    assert cases["infinite 0: 9x17x165"][0].isinf().sum() == 1


def chosen(monkeypatch, *cases) -> list[int]:
    """Offer cases that launch kernels, each with these arguments; list which run, by index."""
    params = [SimpleNamespace(name=name) for name in ("x_ptr", "rows", "HEADS", "WIDE")]
    compiled = CompiledCases(replace(KERNELS[0], triton=lambda: None))

    def launch(*, dtype=torch.float32, rows=7, warps=4, module="kernels.one", **switches):
        body = SimpleNamespace(__name__=f"_kernel_of_{module}", __module__=module)
        function = SimpleNamespace(fn=body, arg_names=[p.name for p in params], params=params)
        arguments = {"x_ptr": torch.empty(64, dtype=dtype), "rows": rows}
        constants = {"HEADS": False, "WIDE": False} | switches
        return Launch(function, (1,), arguments, constants, {"num_warps": warps})

    waiting = iter(cases)

    @contextmanager
    def recorded(record):
        for given in next(waiting):
            record(launch(**given))
        yield

    monkeypatch.setattr(verify, "recorded_launches", recorded)
    return [index for index in range(len(cases)) if compiled.wants(lambda: None)]


THEIRS = {"module": KERNELS[-1].triton.__module__}
FACTS = [{}, {"HEADS": True}, {"HEADS": 2}, {"HEADS": 8}, {"WIDE": True},
         {"dtype": torch.bfloat16}, {"warps": 8}, {"warps": 8, "WIDE": True},
         {"HEADS": 9}, {"dtype": torch.bfloat16, "HEADS": 2}]  # fmt: skip
OFFERED = {
    "each fact, and no combination": ([[fact] for fact in FACTS], [0, 1, 2, 3, 4, 5, 6]),
    "nothing further is compiled": (
        [[{}], [{"rows": 1}], [{"rows": 32}], [{"WIDE": True}], [{}, {"WIDE": True}]],
        [*range(5)],
    ),
    "kernels that others verify": ([[{}, THEIRS], [{}, THEIRS | {"WIDE": True}]], [0]),
    "all are theirs": ([[THEIRS], [THEIRS | {"WIDE": True}]], [0, 1]),
}


@pytest.mark.parametrize("cases", OFFERED)
def test_cases_for_which_something_further_is_compiled_run(cases, monkeypatch):
    offered, running = OFFERED[cases]
    assert chosen(monkeypatch, *offered) == running


def test_a_case_whose_launcher_reads_results_runs():
    compiled = CompiledCases(KERNELS[0])
    assert all(compiled.wants(lambda: torch.empty(0).item()) for _ in range(2))


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

    monkeypatch.setattr(verify, "KERNELS", (replace(pack_trits_verification, torch=lazy),))
    (result,) = checked([], T6, CPU, ["torch"], fuzz=fuzz)
    assert seen
    assert all(seen)
    assert result.unwritten == result.elements > 0


def test_torch_backend_works_on_random_cases_in_the_parts_that_were_drawn(monkeypatch):
    seen = []

    def noted(trits):
        seen.append(chunk_elements(-1))
        return pack_trits_verification.torch(trits)

    spec = replace(pack_trits_verification, torch=noted)
    monkeypatch.setattr(verify, "KERNELS", (spec,))
    (result,) = checked([], T6, CPU, ["torch"], fuzz=9, seed=7)
    cases = [*random_cases(spec, CPU, 6, range(7, 16))]
    assert list(result.shapes) == [case.label for case in cases]
    assert seen == [-1 if case.chunk_elements is None else case.chunk_elements for case in cases]
    assert {-1, 1} < set(seen)


@pytest.mark.parametrize(("got", "expected", "wanted_errors"), [
    ([3.0, 4.0], [3.0, 0.0], (4.0, 4 / 3, 0.6)),
    ([1.0, -2.0], [1.0, -2.0], (0.0, 0.0, 1.0)),
    ([1.0, 2.0], [-1.0, -2.0], (4.0, 2.0, -1.0)),
    ([0.0], [0.0], (0.0, 0.0, 1.0)),
    ([2.0], [0.0], (2.0, None, 0.0)),
    ([], [], (0.0, 0.0, 1.0)),
    ([math.nan, 1.0], [1.0, 1.0], (None, None, 0.0)),
    ([math.inf], [1.0], (None, None, 0.0)),
])  # fmt: skip
def test_errors_are_the_largest_the_relative_and_the_angle(got, expected, wanted_errors):
    assert (worst([0.5, None, 2.0]), worst([0.5, 2.0, 1.0]), worst(iter(()))) == (None, 2.0, 0.0)
    measured = errors(torch.tensor(got), torch.tensor(expected))
    for value, wanted in zip(measured, wanted_errors, strict=True):
        assert value == (wanted if wanted is None else pytest.approx(wanted))


def test_results_of_another_type_or_shape_and_nan_fail():
    values = torch.tensor([1, 2], dtype=torch.int8)
    assert not compare(pack_trits_verification, "", values.int(), values).passed
    wanted = torch.ones(3)
    result = compare(rms_norm_verification, "", torch.tensor([1.0, torch.nan, 1.0]), wanted)
    assert (result.passed, result.max_error, result.unwritten) == (False, None, 1)
    result = compare(KERNELS[0], "case", torch.zeros(2, 3), torch.zeros(3, 2))
    assert (result.passed, result.unequal, result.unwritten, result.elements) == (False, 6, 6, 6)
    assert result.error == "shape (2, 3), not (3, 2)"

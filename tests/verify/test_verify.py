"""The verifier: wrong kernels fail, poison shows, and the random cases can be drawn again."""

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime import native
from arbcli.verify import check_kernels as verify
from arbcli.verify import run as verification
from arbcli.verify.check_kernels import KERNELS, Checks, copies, find_kernels, verify_kernels
from arbcli.verify.compare import compare, errors, worst
from arbcli.verify.fuzz import fuzz_cases, real_cases
from arbcli.verify.kernels.codec.packing import pack_trits_verification
from arbcli.verify.kernels.norm.rms_norm import rms_norm_verification
from arbcli.verify.names import kernel_names
from arbcli.verify.registry import BY_NAME
from arbcli.verify.verification import Gate

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"
T6 = {"T6": 6}
CPU = torch.device("cpu")
SLOWEST = {"stream_weights_backward", "find_chunks", "boundary_scores_backward"}
"""Whose slow references take seconds on large cases."""


def verify_planted(monkeypatch, spec, device, **checks):
    monkeypatch.setattr(verify, "KERNELS", (spec,))
    return verify_kernels([], T6, device, [KERNEL_BACKEND], Checks(**checks))


def off_by_one(trits):
    return pack_trits_verification.triton(trits) + 1


def test_wrong_kernel_fails_with_its_cases(monkeypatch, device):
    report = verify_planted(
        monkeypatch, replace(pack_trits_verification, triton=off_by_one), device
    )
    (result,) = report.kernels
    assert not report.passed
    assert result.unequal == result.elements > 0
    assert "33x123" in [failure.label for failure in result.failures]


def test_kernel_that_raises_fails_its_cases_only(monkeypatch, device):
    def picky(trits):
        if trits.shape == (3, 33):
            raise RuntimeError("no\nsuch shape")
        return pack_trits_verification.triton(trits)

    (result,) = verify_planted(
        monkeypatch, replace(pack_trits_verification, triton=picky), device
    ).kernels
    (failure,) = result.failures
    assert (failure.label, failure.error) == ("3x33", "RuntimeError: no")


def test_integers_of_another_type_are_not_equal():
    values = torch.tensor([1, 2], dtype=torch.int8)
    assert not compare(pack_trits_verification, "", values.int(), values).passed


def test_nan_fails_a_tolerance():
    wanted = torch.ones(3)
    found = compare(rms_norm_verification, "", torch.tensor([1.0, torch.nan, 1.0]), wanted)
    assert not found.passed
    assert found.max_error is None
    assert found.unwritten == 1


def test_counts_of_unequal_elements_are_for_exact_gates_only(device):
    report = verify_kernels(["rms_norm"], T6, device, ["torch"])
    assert report.kernels[0].unequal is None
    assert report.kernels[0].cosine == pytest.approx(1)


def test_kernels_are_given_the_strides_and_the_memory_of_their_cases():
    """A copy that is contiguous would be another case than the one that is told of."""
    base = torch.arange(70, dtype=torch.float32).view(7, 10)
    packed = pack_trits_verification.torch(torch.ones(4, 12, dtype=torch.int8))
    about = Packed(packed[1::2], *torch.ones(2, 2, 4, dtype=torch.int8)[:, :, ::2], 12, 6)
    inputs = base[1::2, 2::3], base.T[3:], base[2:3].expand(5, -1), about, 3
    found = copies(inputs)
    for one, other in zip((*inputs[:3], *about[:3]), (*found[:3], *found[3][:3]), strict=True):
        assert torch.equal(one, other)
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert one.data_ptr() != other.data_ptr()
    assert found[4] == 3


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_loops_in_c_are_verified_with_torch_where_there_are_any():
    for name, backends in (("step_scales", ["torch", "native"]), ("pack_trits", ["torch"])):
        report = verify_kernels([name], T6, torch.device("cpu"), ["torch", "native"])
        assert [result.backend for result in report.kernels] == backends
    (alone,) = verify_kernels(["pack_trits"], T6, torch.device("cpu"), ["native"]).kernels
    assert (alone.backend, alone.passed) == ("native", True)


def test_unknown_kernel_is_refused(device):
    with pytest.raises(ArbError, match="no kernel is named `pack`"):
        verify_kernels(["pack"], T6, device, ["torch"])


def test_every_kernel_can_be_drawn():
    assert all(spec.arguments or spec.draw for spec in KERNELS)


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
    backends = [KERNEL_BACKEND, "torch"]
    report = verify_kernels([spec.name], T6, device, backends, Checks(fuzz=1, seed=11))
    assert report.passed, report.kernels


@pytest.mark.parametrize("name", BY_NAME)
def test_random_case_is_drawn_again_from_its_seed(name, device):
    (one,), (other,) = (list(fuzz_cases(name, device, 6, [5])) for _ in range(2))
    assert one.label == other.label
    assert_same(one.inputs, other.inputs)


def assert_same(inputs, others):
    for a, b in zip(inputs, others, strict=True):
        if isinstance(a, tuple):
            assert_same(a, b)
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        else:
            assert a == b


def test_kernels_are_found_by_name():
    assert find_kernels([]) == list(KERNELS)
    assert find_kernels(["pack_trits"]) == [pack_trits_verification]
    assert sorted(kernel_names()) == sorted(spec.name for spec in KERNELS)


def close(relative: float, peer_slack: float = 0.0):
    return replace(rms_norm_verification, gate=Gate(relative=relative, peer_slack=peer_slack))


@pytest.mark.parametrize(("error", "passed"), [(1.05e-3, True), (1.15e-3, False)])
def test_error_of_a_peer_and_its_slack_are_the_bar(error, passed):
    wanted = torch.ones(50, dtype=torch.float64)
    peer = wanted + 1e-3
    assert compare(close(1e-9, 0.1), "", wanted + error, wanted, peer).passed == passed
    assert not compare(close(1e-9, 0.1), "", wanted + error, wanted).passed


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_no_implementation_is_excused_by_being_its_own_peer(spec):
    """The torch backend is the peer of many kernels, and compared itself."""
    wanted = torch.linspace(1, 2, 50, dtype=torch.float64)
    assert not compare(spec, "", 1.02 * wanted, wanted, 1.02 * wanted).passed


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_no_reference_calls_its_own_kernel(spec):
    """Not in part either, but for what selects the results that are compared."""
    own = [spec.triton, spec.torch, spec.native]
    own = {code for run in own if run for code in codes(run)}
    called = set()
    case = next(spec.cases(torch.device("cpu"), 6))
    for reference in filter(None, (spec.reference, spec.large_reference)):
        selected = codes(reference) | codes(spec.compared)
        sys.setprofile(lambda frame, event, _: event == "call" and called.add(frame.f_code))
        try:
            reference(*copies(case.inputs))
        finally:
            sys.setprofile(None)
        assert not called & (own - selected)


def codes(run: object) -> set:
    """Find the code of a function, and of those that it wraps."""
    run = run.func if isinstance(run, partial) else run
    if not hasattr(run, "__code__"):
        return set()
    wrapped = [cell.cell_contents for cell in run.__closure__ or ()]
    return {run.__code__}.union(*map(codes, wrapped))


@pytest.mark.parametrize(("relative", "passed"), [(0.49, False), (0.51, True)])
def test_errors_are_relative_to_the_reference(relative, passed):
    """2 against 4 is half of it, and 4 against 2 is all of it."""
    small, large = torch.full((9,), 2.0), torch.full((9,), 4.0)
    assert compare(close(relative), "", small, large).passed == passed
    assert not compare(close(relative), "", large, small).passed


def test_figures_of_a_kernel_are_those_of_its_worst_case(device):
    shape = next(case.inputs[0].shape for case in rms_norm_verification.cases(device, 6))

    def wrong_once(*inputs):
        y = rms_norm_verification.torch(*inputs)
        return -y if inputs[0].shape == shape else y

    report = verify_kernels(["rms_norm"], T6, device, ["torch"])
    assert report.kernels[0].cosine > 0.999
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "KERNELS", (replace(rms_norm_verification, torch=wrong_once),))
        (result,) = verify_kernels([], T6, device, ["torch"]).kernels
    assert result.cosine < -0.999
    assert result.max_error > 0.1


def test_real_matrices_are_multiplied_by_few_and_by_many_rows():
    cases = list(real_cases("rms_norm", torch.device("cpu"), 32, [(3, 40)]))
    found = {(case.inputs[0].shape[0], case.inputs[0].dtype) for case in cases}
    assert found == {(m, t) for m in (1, 64, 2048) for t in (torch.bfloat16, torch.float32)}


def test_real_matrices_have_turns_and_six_of_them_are_all():
    shapes = [(3, 40), (3, 45), (3, 50), (3, 55)]
    args = "rms_norm", torch.device("cpu"), 32, shapes
    found = [[case.label for case in real_cases(*args, turn=turn)] for turn in range(6)]
    assert [len(labels) for labels in found] == [len(shapes)] * 6
    assert {label for labels in found for label in labels} == {c.label for c in real_cases(*args)}
    for labels in found:
        assert len({label.split("x")[0] for label in labels}) == 3
        assert len({label.endswith("bf16") for label in labels}) == 2


def test_a_real_case_is_not_drawn_again_where_it_does_not_grow_with_the_matrix():
    args = "compress_blocks", torch.device("cpu"), 32
    one, two = ([*real_cases(*args, [(256, 256), (512, 256)][:n], rows=1)] for n in (1, 2))
    assert len(one) == len(two) == 2


@pytest.mark.parametrize("name", ["choose_byte", "unpack_trits"])
def test_shares_of_a_kernel_are_all_of_its_cases_once(name):
    (spec,) = find_kernels([name])
    labels = [case.label for case in spec.cases(torch.device("cpu"), 32)]
    parts = [*verify._shares(spec, ("triton", "torch"), Checks(), None)]
    assert len(parts) == verify.SHARES
    shared = [labels[first::step] for _, (first, step) in parts]
    assert sorted(label for share in shared for label in share) == sorted(labels)
    assert [*verify._shares(spec, ("torch",), Checks(), None)] == [("cases", (0, 1))]


def test_a_kernel_is_reported_when_all_of_its_parts_are_done(device):
    told = []
    names = ["rms_norm", "step_scales"]
    alone = verify_kernels(names, T6, device, ["torch"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_shares", lambda *_: [("cases", (share, 4)) for share in range(4)])
        report = verify_kernels(names, T6, device, ["torch"], progress=told.append)
    assert [(job.number, job.total, job.name.split()[0]) for job in told] == [
        (1, 2, "rms_norm"), (2, 2, "step_scales")
    ]  # fmt: skip
    for shared, whole in zip(report.kernels, alone.kernels, strict=True):
        assert sorted(shared.shapes) == sorted(whole.shapes)
        same = {"seconds": 0, "shapes": ()}
        assert replace(shared, **same) == replace(whole, **same)


def test_slowest_kernels_are_known():
    assert {*verify.SLOWEST} < {spec.name for spec in KERNELS}


def test_non_finite_error_is_worse_than_any():
    assert worst([0.5, None, 2.0]) is None
    assert worst([0.5, 2.0, 1.0]) == 2.0
    assert worst(iter(())) == 0.0


@pytest.mark.parametrize(("got", "expected", "found"), [
    ([3.0, 4.0], [3.0, 0.0], (4.0, 4 / 3, 0.6)),
    ([1.0, -2.0], [1.0, -2.0], (0.0, 0.0, 1.0)),
    ([1.0, 2.0], [-1.0, -2.0], (4.0, 2.0, -1.0)),
    ([0.0], [0.0], (0.0, 0.0, 1.0)),
    ([2.0], [0.0], (2.0, None, 0.0)),
    ([], [], (0.0, 0.0, 1.0)),
    ([math.nan, 1.0], [1.0, 1.0], (None, None, 0.0)),
    ([math.inf], [1.0], (None, None, 0.0)),
])  # fmt: skip
def test_errors_are_the_largest_the_relative_and_the_angle(got, expected, found):
    measured = errors(torch.tensor(got), torch.tensor(expected))
    for value, wanted in zip(measured, found, strict=True):
        assert value == (wanted if wanted is None else pytest.approx(wanted))


def test_result_of_another_shape_fails_whole():
    (spec, *_) = KERNELS
    result = compare(spec, "case", torch.zeros(2, 3), torch.zeros(3, 2))
    assert (result.passed, result.unequal, result.unwritten, result.elements) == (False, 6, 6, 6)
    assert result.error == "shape (2, 3), not (3, 2)"


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        ({}, True),
        ({"exhaustive": True}, False),
        ({"backend": "torch"}, False),
        ({"fuzz": 3}, False),
    ],
    ids=str,
)
def test_parts_have_the_requested_checks(given, sampled, monkeypatch):
    """Where one is told otherwise, a sample passes for all."""
    asked = {}

    def noted(name):
        def part(*inputs, **named):
            asked[name] = (*inputs, *named.items())
            return lambda: SimpleNamespace(kernels=(), __iter__=iter) if name == "kernels" else ()

        return part

    monkeypatch.setattr(verification, "begin_kernels", noted("kernels"))
    monkeypatch.setattr(verification, "begin_parity", noted("parity"))
    monkeypatch.setattr(verification, "Workers", lambda number: nullcontext(mock.Mock()))
    request = verification.VerifyRequest(scale_type="T6", seed=4, device="cpu", **given)
    verification.verify(request)
    names, scale_types, device, backends, checks, *_ = asked["kernels"]
    assert (names, scale_types, device) == ((), T6, CPU)
    assert (checks.fuzz, checks.seed, checks.sampled) == (given.get("fuzz", 0), 4, sampled)
    assert backends == (("torch",) if "backend" in given else verification._backends(CPU))
    assert ("parity" in asked) == (not given.get("fuzz"))
    if "parity" in asked:
        assert asked["parity"][:3] == (CPU, backends, T6)
        assert ("sampled", sampled) in asked["parity"]

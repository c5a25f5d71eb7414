"""Timing: what follows from the times, what may be timed, and on what. No test asserts a speed."""

import itertools
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from checked import checked
from torch._subclasses.fake_tensor import FakeTensorMode

from arbcli.base.errors import ArbError
from arbcli.kernels.codec.packed import Packed
from arbcli.verify import check_kernels as verify
from arbcli.verify import timing
from arbcli.verify.compare import as_tuple
from arbcli.verify.kernels.codec.packing import pack_trits_verification, unpack_trits_verification
from arbcli.verify.registry import KERNELS
from arbcli.verify.timing import (
    Roofline,
    Stopwatch,
    check_timeable,
    measure_roofline,
    median_ratio,
    time_calls,
    time_kernels,
)
from arbcli.verify.verification import Timing

CPU = torch.device("cpu")
NOT_TIMED = ("attend_ahead", "accept_ahead", "keep_accepted", "repeat_ahead", "propose_byte")
"""Parts of a check of several bytes, which is timed as a whole by its benchmark."""
ROOFLINE = Roofline(bytes_per_second=1e12, flops_per_second=1e15, launch_us=3.0)


class FakeStopwatch:
    """Shows the times it was given, a list for each call in its place, and calls nothing."""

    device = CPU

    def __init__(self, *times):
        self.shown, self.captured, self.turns, self.now = times, 0, 0, 0.0

    def capture(self, call):
        self.captured += 1
        return call

    def times(self, calls, turns):
        self.turns = turns
        self.now += 0.01 * turns
        return [list(times) for times in self.shown[: len(calls)]]


@pytest.fixture
def known_roofline(monkeypatch):
    monkeypatch.setattr(timing, "measure_roofline", lambda _: ROOFLINE)


def results(*names, passed=True):
    """Make results of verification as if the compiled kernels had run."""
    results = checked(names, {"T6": 6}, CPU, ["torch"])
    return [replace(result, backend="triton", passed=passed) for result in results]


def test_slower_of_bytes_and_products_is_the_floor():
    assert ROOFLINE.floor_us(2_000_000, 0) == (pytest.approx(2.0), "memory")
    assert ROOFLINE.floor_us(2_000_000, 4 * 10**9) == (pytest.approx(4.0), "products")
    assert ROOFLINE.floor_us(5_000_000, 4 * 10**9) == (pytest.approx(5.0), "memory")


def test_ratio_is_of_the_same_turns():
    assert median_ratio([1.0, 2.0, 4.0], [2.0, 2.0, 12.0]) == 2.0


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, 10), (0.25, 25), (60.0, 500)])
def test_turns_fill_the_time(monkeypatch, seconds, turns):
    stopwatch = FakeStopwatch([1.0], [2.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: stopwatch.now)
    assert time_calls([print, print], stopwatch, seconds) == [[1.0], [2.0]]
    assert stopwatch.turns == turns
    assert stopwatch.captured == 2


def test_result_counts_the_bytes_that_must_move(monkeypatch, known_roofline):
    def add(values, nothing, amount):
        return values.add_(amount), values.sum(dtype=torch.int64)

    inputs = (torch.zeros(2500, dtype=torch.int32), None, 1)
    timings = [Timing("2500", inputs, add, peer=print, peer_name="other", flops=10**6)]
    spec = replace(pack_trits_verification, timings=lambda *_: timings)
    monkeypatch.setattr(verify, "KERNELS", (spec,))
    report = time_kernels(results("pack_trits"), FakeStopwatch([4.0, 2.0, 3.0], [6.0, 6.0, 6.0]), 6)
    (timed,) = report.timings
    assert report.roofline == ROOFLINE
    assert (timed.kernel, timed.shape, timed.us, timed.turns) == ("pack_trits", "2500", 3.0, 3)
    assert (timed.peer, timed.peer_us, timed.ratio) == ("other", 6.0, 2.0)
    assert timed.moved_bytes == 2 * 10_000 + 8
    assert timed.bound == "memory"
    assert timed.floor_us == pytest.approx(0.020008)
    assert timed.share == pytest.approx(0.020008 / 3)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_kernel_declares_whether_it_is_timed(spec):
    assert (spec.timings is None) == (spec.name in NOT_TIMED)


def test_kernel_without_results_or_peer_counts_its_inputs_and_has_no_ratio(
    monkeypatch, known_roofline
):
    inputs = (torch.zeros(3), torch.zeros(5, dtype=torch.int8))
    spec = replace(
        pack_trits_verification, timings=lambda *_: [Timing("a", inputs, run=lambda *_: None)]
    )
    monkeypatch.setattr(verify, "KERNELS", (spec,))
    (timed,) = time_kernels(results("pack_trits"), FakeStopwatch([4.0]), 6).timings
    assert timed.moved_bytes == 3 * 4 + 5
    assert (timed.peer, timed.peer_us, timed.ratio) == (None, None, None)


def test_kernel_that_failed_is_not_timed(monkeypatch, known_roofline):
    def never(*_):
        raise AssertionError("timed")

    specs = [
        replace(pack_trits_verification, timings=never),
        replace(unpack_trits_verification, timings=lambda *_: []),
    ]
    monkeypatch.setattr(verify, "KERNELS", tuple(specs))
    right, wrong = results("pack_trits", "unpack_trits"), results("pack_trits", passed=False)
    for all_results in ([*right, *wrong], [*wrong, *right]):  # of several scale types any may fail
        report = time_kernels(all_results, FakeStopwatch(), 6)
        assert report.not_timed == {"pack_trits": "it did not pass"}


def test_kernel_that_was_not_verified_is_not_timed(known_roofline):
    of_torch = [replace(result, backend="torch") for result in results("pack_trits")]
    report = time_kernels(of_torch, FakeStopwatch(), 6)
    assert (report.timings, report.not_timed) == ((), {})


@pytest.mark.parametrize(
    ("device", "backends", "message"),
    [
        ("cpu", ["interpreter", "torch"], "`--time` needs a CUDA device, and this run is on `cpu`"),
        ("cuda", ["torch"], "and only torch would be verified"),
    ],
)
def test_timing_without_a_gpu_or_triton_is_refused(device, backends, message):
    with pytest.raises(ArbError, match=message):
        check_timeable(torch.device(device), backends)
    check_timeable(torch.device("cuda"), ["triton", "torch"])


def test_roofline_is_of_bytes_both_ways_and_of_both_operations():
    with FakeTensorMode():  # of torch's documentation, though its module is named as private
        roofline = measure_roofline(FakeStopwatch([1000.0], [2000.0], [3.0]))
    assert roofline.bytes_per_second == pytest.approx(2**30 / 1e-3)
    assert roofline.flops_per_second == pytest.approx(2 * 8192**3 / 2e-3)
    assert roofline.launch_us == 3.0


def description(value):
    if isinstance(value, Packed):
        return tuple(map(description, value))
    if not isinstance(value, torch.Tensor):
        return type(value)
    # the cases are float32 where the interpreter runs them, as it computes wrongly in bf16
    kind = "real" if value.dtype.is_floating_point else value.dtype
    return kind, value.dim()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*filter(attrgetter("timings"), KERNELS)], ids=attrgetter("name"))
def test_kernel_is_timed_on_inputs_like_its_cases(spec):
    cases = [case.inputs for case in spec.cases(CPU, 32)]
    # the last arguments may be left out, and of merged launches there are any number
    known = [set(map(description, values)) for values in itertools.zip_longest(*cases)]
    with FakeTensorMode(allow_non_fake_inputs=True):  # shapes and types, without the memory
        timings = list(spec.timings(CPU, 32))
    assert timings
    for item in timings:
        if spec.timed:
            with FakeTensorMode(allow_non_fake_inputs=True):
                spec.operation.check(*item.inputs)
        for value, allowed in zip(item.inputs, known, strict=False):
            assert description(value) in allowed, item.label


@pytest.mark.parametrize(
    "name",
    [
        "ternary_matmul", "ternary_matmul_grad_x", "rms_norm", "embedding_rows", "embedding_grad",
        "weighted_rows", "gather_rows",
    ],
)  # fmt: skip
def test_peer_does_the_same_work(name):
    (spec,) = verify.find_kernels([name])
    with FakeTensorMode(allow_non_fake_inputs=True):
        for item in spec.timings(CPU, 32):
            shapes = [result.shape for result in as_tuple(item.peer())]
            assert shapes == [result.shape for result in as_tuple(spec.torch(*item.inputs))]


@pytest.mark.gpu
def test_captured_call_is_replayed(device):
    count = torch.zeros(1, device=device)
    stopwatch = Stopwatch(device)
    replay = stopwatch.capture(lambda: count.add_(1))
    before = int(count)
    times = stopwatch.times([replay, replay], 3)
    assert int(count) == before + 6
    assert [len(turns) for turns in times] == [3, 3]
    assert all(us > 0 for turns in times for us in turns)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_kernel_can_be_timed(monkeypatch, known_roofline, spec, device):
    monkeypatch.setattr(timing, "TURNS", (2, 2))
    report = time_kernels(results(spec.name), Stopwatch(device), 32)
    untimed = {spec.name: "it has nothing to be timed on"} if spec.name in NOT_TIMED else {}
    assert report.not_timed == untimed
    assert all(timed.us > 0 and timed.turns == 2 for timed in report.timings)

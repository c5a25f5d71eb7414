"""Timing: what follows from the times, what may be timed, and on what. No test asserts a speed."""

import itertools
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from checked import checked
from torch._subclasses.fake_tensor import FakeTensorMode

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime.operation import Operation
from arbcli.verify import check_kernels as verify
from arbcli.verify import timing
from arbcli.verify.cases import production_cases
from arbcli.verify.compare import as_tuple
from arbcli.verify.kernels.codec.packing import pack_trits_verification, unpack_trits_verification
from arbcli.verify.registry import KERNELS
from arbcli.verify.timing import Roofline, Stopwatch, check_timeable, measure_roofline, time_kernels
from arbcli.verify.verification import Case, Verification, same_inputs

CPU = torch.device("cpu")
ROOFLINE = Roofline(bytes_per_second=1e12, flops_per_second=1e15, launch_us=3.0)


class FakeStopwatch:
    """Shows the times it was given, a list for each call in its place, and calls nothing."""

    device = CPU

    def __init__(self, *times):
        self.shown = times

    def capture(self, call):
        return call

    def times(self, calls, turns):
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


def timed(monkeypatch, spec, inputs, *times):
    """Time a kernel on one case, by a stopwatch that shows the given times."""
    passed = results("pack_trits")
    monkeypatch.setattr(timing, "production_cases", lambda *_: [Case("a", inputs)])
    monkeypatch.setattr(verify, "KERNELS", (spec,))
    return time_kernels(passed, FakeStopwatch(*times), 6)


def declared(run, *names, **fields):
    """Declare a kernel with the name of one that was verified."""
    operation = Operation("pack_trits", run, run, "; ".join(names))
    return Verification(operation, run, **fields)


def test_result_counts_the_bytes_that_must_move(monkeypatch, known_roofline):
    def add(values, nothing, amount):
        return values.add_(amount), values.sum(dtype=torch.int64)

    inputs = (torch.zeros(2500, dtype=torch.int32), None, 1)
    report = timed(
        monkeypatch, declared(add, "values", "nothing", "amount", library=same_inputs(print)),
        inputs, [4.0, 2.0, 3.0], [6.0, 6.0, 6.0],
    )  # fmt: skip
    (result,) = report.timings
    assert report.roofline == ROOFLINE
    assert (result.kernel, result.shape, result.us, result.turns) == ("pack_trits", "a", 3.0, 3)
    assert (result.library_us, result.ratio) == (6.0, 2.0)
    assert (result.moved_bytes, result.flops) == (2 * 10_000 + 8, 0)
    assert result.bound == "memory"
    assert result.floor_us == pytest.approx(0.020008)
    assert result.share == pytest.approx(0.020008 / 3)


def test_products_of_the_library_and_only_looked_up_rows_count(monkeypatch, known_roofline):
    inputs = torch.zeros(8, 100), torch.zeros(100, 50)
    spec = declared(lambda a, b: a @ b, "a", "b", library=same_inputs(torch.matmul))
    with monkeypatch.context() as patch:
        (result,) = timed(patch, spec, inputs, [1.0], [1.0]).timings
    assert result.flops == 2 * 8 * 100 * 50
    spec = declared(lambda table, rows: table[rows], "table", "rows", looked_up="table")
    inputs = torch.zeros(1000, 4), torch.arange(3)
    (result,) = timed(monkeypatch, spec, inputs, [1.0]).timings
    assert result.moved_bytes == 3 * 8 + 3 * 4 * 4


def test_kernel_that_failed_or_cannot_be_captured_is_not_timed(monkeypatch, known_roofline):
    def never(*_):
        raise AssertionError("timed")

    monkeypatch.setattr(timing, "production_cases", never)
    specs = pack_trits_verification, replace(unpack_trits_verification, timed=False)
    monkeypatch.setattr(verify, "KERNELS", specs)
    right, wrong = results("pack_trits", "unpack_trits"), results("pack_trits", passed=False)
    for all_results in ([*right, *wrong], [*wrong, *right]):  # of several scale types any may fail
        report = time_kernels(all_results, FakeStopwatch(), 6)
        assert report.not_timed == {
            "pack_trits": "it did not pass", "unpack_trits": "a CUDA graph cannot capture it",
        }  # fmt: skip


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


@pytest.mark.parametrize("spec", [*filter(attrgetter("library"), KERNELS)], ids=attrgetter("name"))
def test_library_does_the_same_work(spec):
    (case,) = itertools.islice(production_cases(spec, CPU, 32, (96, 160)), 1)
    call = spec.library(*case.inputs)
    if spec.name == "causal_attention_backward":  # torch has this one on GPUs alone
        return
    # results beside the first are states
    assert as_tuple(call())[0].numel() == as_tuple(spec.torch(*case.inputs))[0].numel()


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
    assert list(report.not_timed) == ([] if spec.timed else [spec.name])
    assert all(timed.us > 0 and timed.turns == 2 for timed in report.timings)

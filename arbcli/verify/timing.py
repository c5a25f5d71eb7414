"""Time kernels relative to torch's operations, and to the limits of the machine in that run.

Each timed call is captured as a CUDA graph and replayed between two events, as a training step is.
This excludes Python but not the launch: an empty call takes `Roofline.launch_us`, which every time
includes, the operation's and the library's. A kernel of 5 us is therefore faster than its share of
the roofline suggests, and its ratio is nearer 1.

Caches are cold. Before each call a buffer of four times the L2 cache is read, and meanwhile the
call is queued, so that the GPU never waits for Python. It is read and not written, for a cache full
of written lines would be written back at the expense of the call. For the same reason a call whose
results stay in the cache can be above the roofline.

Calls that are compared take turns, and a ratio is the median over turns, so that clocks, heat and
other users of the machine reach both alike. Nothing here asserts a speed.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.device import capturing
from arbcli.verify.cases import production_cases
from arbcli.verify.check_kernels import KernelResult, find_kernels
from arbcli.verify.verification import Case, Verification

WARM_UPS = 3
"""Warm-up calls before a capture, and warm-up turns."""
TURNS = (10, 500)
"""Minimum and maximum number of turns, whatever their time."""


class Stopwatch:
    """Times calls on a GPU, each from a cold cache.

    Args:
        device: a CUDA device, which nothing else should be using.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
        # as many float32 as the cache has bytes: four times the cache
        self._other_data = torch.zeros(self.cache_bytes, dtype=torch.float32, device=device)
        self._stream = torch.cuda.Stream(device)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Capture the launches of a call, which must not wait for the GPU; return their replay."""
        torch.cuda.synchronize(self.device)  # inputs are made on another stream
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):  # compiles kernels and allocates the library's workspace
                call()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=self._stream):
            call()
        return graph.replay

    def times(self, calls: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
        """Time every call once a turn; microseconds of each turn, by call."""
        torch.cuda.synchronize(self.device)
        events = []
        with torch.cuda.stream(self._stream):
            for call in turns * [*calls]:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._other_data.sum()
                start.record()
                call()
                end.record()
                events.append((start, end))
        torch.cuda.synchronize(self.device)
        elapsed = [1000 * start.elapsed_time(end) for start, end in events]
        return [elapsed[index :: len(calls)] for index in range(len(calls))]


def time_calls(
    calls: Sequence[Callable[[], object]], stopwatch: Stopwatch, seconds: float = 0.3
) -> list[list[float]]:
    """Time calls in turns.

    Args:
        calls: calls to time, which must keep their inputs alive.
        stopwatch: stopwatch of their device.
        seconds: total time, without warm-up.

    Returns:
        Microseconds of each turn, by call.
    """
    replays = [stopwatch.capture(call) for call in calls]
    started = time.perf_counter()
    stopwatch.times(replays, WARM_UPS)
    seconds_per_turn = (time.perf_counter() - started) / WARM_UPS
    minimum, maximum = TURNS
    return stopwatch.times(replays, min(maximum, max(minimum, round(seconds / seconds_per_turn))))


def median_ratio(ours: Sequence[float], peers: Sequence[float]) -> float:
    """Return the median speed relative to a peer, from times of the same turns."""
    return median(peer / our for our, peer in zip(ours, peers, strict=True))


@dataclass(frozen=True, slots=True)
class Roofline:
    """Figures of the machine in the run that it is compared with."""

    bytes_per_second: float
    """Read and written by a kernel that negates 512 MiB; a copy engine would be slower."""
    flops_per_second: float
    """Speed of a bf16 product of two random 8192 x 8192 matrices."""
    launch_us: float
    """Time of a call that changes one number."""

    def floor_us(self, moved_bytes: int, flops: int) -> tuple[float, str]:
        """Return the minimum time in microseconds, and whether memory or products limit it."""
        memory, products = moved_bytes / self.bytes_per_second, flops / self.flops_per_second
        return max((1e6 * memory, "memory"), (1e6 * products, "products"))


def measure_roofline(stopwatch: Stopwatch) -> Roofline:
    """Measure the bandwidth, the products and the launches of a device; takes a second."""
    half: TensorOptions = {"device": stopwatch.device, "dtype": torch.bfloat16}
    source, target = torch.zeros(2**28, **half), torch.zeros(2**28, **half)
    a, b = torch.randn(8192, 8192, **half), torch.randn(8192, 8192, **half)
    scalar = torch.zeros(1, **half)
    calls = (
        partial(torch.neg, source, out=target),
        partial(torch.matmul, a, b),
        partial(scalar.add_, 1),
    )
    copy_us, matmul_us, launch_us = map(median, time_calls(calls, stopwatch, seconds=1))
    return Roofline(2 * source.nbytes / copy_us * 1e6, 2 * 8192**3 / matmul_us * 1e6, launch_us)


@dataclass(frozen=True, slots=True)
class TimingResult:
    """Speed of a kernel."""

    kernel: str
    shape: str
    us: float
    """Median of the turns, in microseconds."""
    library_us: float | None
    """The same of torch's or cuBLAS's call for the same work, if there is one."""
    ratio: float | None
    """Time of that call divided by the operation's."""
    moved_bytes: int
    """Bytes of the inputs, read once, and of the results, written once."""
    flops: int
    """Multiplications and additions of the products of the library."""
    floor_us: float
    """Minimum time by the roofline, in microseconds."""
    bound: str
    """Bound: `memory` or `products`."""
    share: float
    """Share of the roofline: its floor divided by the measured time."""
    turns: int


@dataclass(frozen=True, slots=True)
class TimingReport:
    """Speeds of the verified kernels."""

    roofline: Roofline
    timings: tuple[TimingResult, ...]
    not_timed: dict[str, str]
    """Kernel to reason."""


def check_timeable(device: torch.device, backends: Iterable[str]) -> None:
    """Check that kernels can run here and are verified before they are timed.

    Raises:
        ArbError: `device` is not a GPU, or its kernels are not among the `backends` to be verified.
    """
    if device.type != "cuda":
        raise ArbError(
            f"`--time` needs a CUDA device, and this run is on `{device}`",
            "leave `--time` out, or use a machine with an NVIDIA GPU",
        )
    if "triton" not in backends:
        raise ArbError(
            f"`--time` times `triton` kernels, and only {', '.join(backends)} would be verified",
            "leave `--backend` out",
        )


def time_kernels(
    results: Iterable[KernelResult],
    stopwatch: Stopwatch,
    group_size: int,
    progress: Callable[[str], None] = lambda _: None,
) -> TimingReport:
    """Time the kernels that passed, and no other, on their cases of production sizes.

    Args:
        results: results of their verification.
        stopwatch: stopwatch of the device of the verification.
        group_size: group size of the scales of timed matrices.
        progress: called with the name of each kernel before it is timed.
    """
    passed: dict[str, bool] = {}
    for result in results:
        if result.backend == "triton":
            passed[result.kernel] = passed.get(result.kernel, True) and result.passed
    progress("timing  the roofline")
    roofline = measure_roofline(stopwatch)
    timings: list[TimingResult] = []
    not_timed: dict[str, str] = {}
    for name in passed:
        (spec,) = find_kernels([name])
        if not passed[name]:
            not_timed[name] = "it did not pass"
        elif not spec.timed:
            not_timed[name] = "a CUDA graph cannot capture it"
        else:
            progress(f"timing  {name}")
            for case in production_cases(spec, stopwatch.device, group_size):
                timings.append(_time(spec, case, stopwatch, roofline))
    return TimingReport(roofline, tuple(timings), not_timed)


def num_bytes(value: object) -> int:
    """Count the bytes of an argument, of all its tensors if it is a tuple of them."""
    if isinstance(value, tuple):
        return sum(map(num_bytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0


def _time(spec: Verification, case: Case, stopwatch: Stopwatch, roofline: Roofline) -> TimingResult:
    run: Callable[[], Any] = partial(spec.operation.triton, *case.inputs)
    results, moved_bytes = run(), num_bytes(case.inputs)
    if not any(results is value for value in case.inputs):
        moved_bytes += num_bytes(results)
    if spec.looked_up:
        moved_bytes -= num_bytes(case.inputs[[*spec.arguments].index(spec.looked_up)])
    calls, flops = [run], 0
    if spec.library:
        calls.append(spec.library(*case.inputs))
        with FlopCounterMode(display=False) as counter:
            calls[1]()
        flops = counter.get_total_flops()
    ours, *peers = time_calls(calls, stopwatch)
    floor_us, bound = roofline.floor_us(moved_bytes, flops)
    return TimingResult(
        kernel=spec.name,
        shape=case.label,
        us=median(ours),
        library_us=median(peers[0]) if peers else None,
        ratio=median_ratio(ours, peers[0]) if peers else None,
        moved_bytes=moved_bytes,
        flops=flops,
        floor_us=floor_us,
        bound=bound,
        share=floor_us / median(ours),
        turns=len(ours),
    )

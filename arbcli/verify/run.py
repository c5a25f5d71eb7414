"""A verification from request to ledger: its checks, devices and omissions."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from arbcli.base.signals import Interrupted, RaisedSignal
from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.config.settings import check_choice
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import HAS_TRITON
from arbcli.kernels.runtime.device import resolve_device
from arbcli.verify.check_kernels import (
    KernelJob,
    KernelResult,
    check_kernel,
    find_kernels,
    kernel_jobs,
)
from arbcli.verify.ledger import Ledger, new_ledger, verdict
from arbcli.verify.models import LARGEST, LONGEST
from arbcli.verify.parity import check_model, compilations, compile_share
from arbcli.verify.scale_types import ALWAYS, DEFAULT_SCALE_TYPE, TRITON_BACKENDS
from arbcli.verify.subjects import FEW_MODELS, TRAINED_MODEL, ParityResult, Subject, all_subjects
from arbcli.verify.timing import Stopwatch, TimingReport, check_timeable, time_kernels
from arbcli.verify.workers import Job, Workers

GPU_PROCESSES = 32
"""The most processes that share a GPU; each takes memory of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Scope of a verification."""

    names: tuple[str, ...] = ()
    """Names of kernels; empty for all kernels and the models."""
    scale_type: str | None = DEFAULT_SCALE_TYPE
    """None is every one."""
    fuzz: int = 0
    """Random cases a kernel; where there are any, nothing else is checked."""
    seed: int = 0
    """Seed of the first random case."""
    timed: bool = False
    """Whether the kernels that pass are timed too."""
    device: str | None = None
    """None is the GPU if there is one."""
    backend: str | None = None
    """None is every one that runs on the device; one that is named runs all cases."""
    exhaustive: bool = False
    """Whether kernels in Triton run all cases in all scale types."""

    @property
    def scale_types(self) -> dict[str, int]:
        """Scale types to check, and how many weights share a scale."""
        chosen = SCALE_TYPES if self.scale_type is None else (self.scale_type,)
        return {name: SCALE_TYPES[name] for name in chosen}

    @property
    def sampled(self) -> bool:
        """Whether kernels in Triton have a sample of the checks."""
        return not (self.exhaustive or self.backend or self.fuzz)

    @property
    def whole_model(self) -> bool:
        """Whether the model made of the kernels is checked too."""
        return not self.names and not self.fuzz


@dataclass(slots=True)
class Results:
    """Results so far."""

    kernels: list[KernelResult] = field(default_factory=list)
    parity: list[ParityResult] = field(default_factory=list)
    timing: TimingReport | None = None
    missing: dict[int, str] = field(default_factory=dict)
    """Titles of the checks that are not done, by the index of the job."""


def verify(request: VerifyRequest, show: Callable[[str], None] = lambda _: None) -> Ledger:
    """Run the requested checks; SIGINT and SIGTERM end them with the results so far.

    Args:
        request: checks, device and backends.
        show: called with a line for each finished part.

    Raises:
        ArbError: there is no such kernel, scale type, device or backend.
    """
    if request.scale_type is not None:
        check_choice("scale_type", request.scale_type, SCALE_TYPES)
    device = resolve_device(request.device)
    backends = (request.backend,) if request.backend else _backends(device)
    if request.timed:
        check_timeable(device, backends)
    results, interrupted, started = Results(), None, time.perf_counter()
    try:
        with RaisedSignal():
            _check(request, device, backends, results, show)
            if request.timed:  # when the other processes are gone
                group_size = SCALE_TYPES[request.scale_type or DEFAULT_SCALE_TYPE]
                results.timing = time_kernels(results.kernels, Stopwatch(device), group_size, show)
    except Interrupted as signal:
        interrupted = signal.name
    missing = dict.fromkeys(results.missing.values())
    not_verified = [
        *([f"stopped by {interrupted} before these checks: {', '.join(missing)}"] * bool(missing)),
        *(f"{spec.name}: {item}" for spec in find_kernels(request.names)
          for item in spec.not_verified),
        *_left_out(request, device, backends),
    ]  # fmt: skip
    return new_ledger(
        device=device,
        scale_types=tuple(request.scale_types),
        kernels=tuple(results.kernels),
        parity=tuple(results.parity),
        not_verified=tuple(not_verified),
        seconds=round(time.perf_counter() - started, 1),
        timing=results.timing,
        interrupted=interrupted,
        sampled=tuple(_sampled(request, backends, results.kernels)),
    )


def _check(
    request: VerifyRequest,
    device: torch.device,
    backends: tuple[str, ...],
    results: Results,
    show: Callable[[str], None],
) -> None:
    """Compare kernels and models with their references, in one queue of processes."""
    kernels = kernel_jobs(
        request.names, request.scale_types, device, backends,
        fuzz=request.fuzz, seed=request.seed, sampled=request.sampled,
    )  # fmt: skip
    subjects = []
    if request.whole_model:
        subjects = list(all_subjects(device, backends, request.scale_types))
    jobs: list[Job] = [
        *((compile_share, share) for share in compilations(subjects)),
        *((check_kernel, job) for job in kernels),
        *((check_model, subject) for subject in subjects),
    ]
    results.missing = {
        index: argument.title
        for index, (_, argument) in enumerate(jobs)
        if isinstance(argument, KernelJob | Subject)
    }
    total, kernel_results = len(results.missing), {}

    def done(index: int, result: list) -> None:
        if index not in results.missing:  # it compiled ahead
            return
        title = results.missing.pop(index)
        if isinstance(jobs[index][1], KernelJob):
            kernel_results[index] = result
            ordered = sorted(kernel_results.items())
            results.kernels = [result for _, job_results in ordered for result in job_results]
        else:
            results.parity += result
        show(f"verified  {total - len(results.missing)}/{total}  {title}  {verdict(result)}")

    with Workers(1 if request.names else _num_workers(device)) as workers:
        workers.run(jobs, done)


def _backends(device: torch.device) -> tuple[str, ...]:
    """Return the backends that run on a device, each with code of its own."""
    triton_backends = ["triton" if device.type == "cuda" else "interpreter"] if HAS_TRITON else []
    has_loops = device.type == "cpu" and native.available()
    return (*triton_backends, "torch", *(["native"] if has_loops else []))


def _num_workers(device: torch.device) -> int:
    """Choose a number of processes; each takes memory of a GPU, too."""
    # a container or a job of a cluster may have few of the machine's
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    if device.type != "cuda":
        return cores
    return max(1, min(cores, GPU_PROCESSES, torch.cuda.mem_get_info(device)[0] >> 32))


def _sampled(
    request: VerifyRequest, backends: tuple[str, ...], kernels: Iterable[KernelResult]
) -> Iterable[str]:
    """State what Triton left out, besides scale types that were not asked for."""
    if not (request.sampled and {*backends} & {*TRITON_BACKENDS}):
        return
    again = "all with `--exhaustive`"
    triton_results = [result for result in kernels if result.backend in TRITON_BACKENDS]
    left_out = sum(result.left_out for result in triton_results)
    if left_out:
        cases = sum(len(result.shapes) for result in triton_results)
        yield (
            f"{cases:,} of {cases + left_out:,} cases in Triton: each type, switch and size of"
            f" tiles is compiled, not each pair; {again}"
        )
    if len(request.scale_types) > 1:
        yield (
            f"scale types in Triton: {' and '.join(ALWAYS)}, and one of each other path that a"
            f" kernel takes; {again}"
        )
    if request.whole_model and "interpreter" in backends:
        yield f"models in the interpreter: ragged, {', '.join(FEW_MODELS)}, from the bytes on"
    elif request.whole_model:
        yield (
            f"models on a GPU: {', '.join(LARGEST)} in bf16, with up to {LONGEST} bytes, and small"
            f" ones in float32; of kernels compiled for any number, but for {TRAINED_MODEL}"
        )


def _left_out(
    request: VerifyRequest, device: torch.device, backends: tuple[str, ...]
) -> Iterable[str]:
    """Return what was not requested or cannot be verified here, and why."""
    if "triton" not in backends:
        yield f"the compiled kernels: nothing ran on a GPU, but on {device.type}"
        yield "bfloat16 in the kernels: Triton's interpreter computes it wrongly"
        yield "the real sizes of the presets: they need a GPU"
    if "native" not in backends:
        requested = device.type != "cpu" or native.available()
        yield f"the native backend: {'it was not asked for' if requested else native.why_not()}"
    if "torch" not in backends:
        yield "the torch backend: another one was asked for"
    if request.names:
        yield "other kernels, and the whole model: kernels were named"
    elif request.fuzz:
        yield "cases of special values, and the whole model: random cases were asked for"
    else:
        yield "blocks of a preset after its second that are like others: one stands for all"
        yield "Mamba in bf16 against float64: a gated output near 0 is mostly rounding"
        if "triton" in backends:
            yield (
                f"presets but {', '.join(LARGEST)}, and these where a GPU has less than 96 bytes"
                " for each of their weights"
            )
    missing = [name for name in SCALE_TYPES if name not in request.scale_types]
    if missing:
        yield f"scale types {', '.join(missing)}: `--all-tscale-types` was not given"
    yield "float baselines and their optimizers: they are torch's own"
    if not request.timed:
        yield "speed: `--time` was not given"

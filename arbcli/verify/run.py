"""A verification from request to ledger: its checks, devices and omissions."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from arbcli.base.signals import Interrupted, RaisedSignal
from arbcli.config.checks import check_choice
from arbcli.config.site import SCALE_TYPES
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import HAS_TRITON
from arbcli.kernels.runtime.device import resolve_device
from arbcli.verify.check_kernels import Checks, KernelResult, begin_kernels, find_kernels
from arbcli.verify.compile_ahead import CompileResult, compile_kernels, find_targets
from arbcli.verify.ledger import Ledger, new_ledger, verdict
from arbcli.verify.models import LONGEST, SHORTEST, matrix_shapes
from arbcli.verify.parity import begin_parity
from arbcli.verify.sample import ALWAYS, DEFAULT_SCALE_TYPE, IN_TRITON
from arbcli.verify.subjects import FEW_MODELS, INTERPRETED, LARGEST, SAMPLED_CTX, ParityResult
from arbcli.verify.timing import Stopwatch, TimingReport, check_timeable, time_kernels
from arbcli.verify.workers import JobDone, Workers

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
    targets: str | None = None
    """GPUs to compile for, as `find_targets` reads them."""
    timed: bool = False
    """Whether the kernels that pass are timed too."""
    device: str | None = None
    """None is the GPU if there is one."""
    backend: str | None = None
    """None is every one that runs on the device; one that is named is not sampled."""
    exhaustive: bool = False
    """Whether all is checked, and no sample."""

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
class _Found:
    """Results so far."""

    kernels: list[KernelResult] = field(default_factory=list)
    parity: list[ParityResult] = field(default_factory=list)
    compiled: list[CompileResult] = field(default_factory=list)
    timing: TimingReport | None = None


def verify(request: VerifyRequest, show: Callable[[str], None] = lambda _: None) -> Ledger:
    """Run the requested checks; SIGINT and SIGTERM end them with the results so far.

    Args:
        request: checks, device and backends.
        show: called with a line for each finished part.

    Raises:
        ArbError: there is no such kernel, scale type, target, device or backend.
    """
    if request.scale_type is not None:
        check_choice("scale_type", request.scale_type, SCALE_TYPES)
    device = resolve_device(request.device)
    backends = (request.backend,) if request.backend else _backends(device)
    targets = find_targets(request.targets) if request.targets else []
    if request.timed:
        check_timeable(device, backends)
    found, interrupted, started = _Found(), None, time.perf_counter()
    try:
        with RaisedSignal():
            _check(request, device, backends, targets, found, show)
    except Interrupted as signal:
        interrupted = signal.name
    left_out = [
        *(_not_reached(request, found, interrupted) if interrupted else ()),
        *_of_kernels(request),
        *_not_drawn(found),
        *_left_out(request, device, backends),
    ]
    seconds = time.perf_counter() - started
    return new_ledger(
        device,
        request.scale_types,
        tuple(found.kernels),
        tuple(found.parity),
        tuple(found.compiled),
        left_out,
        seconds,
        found.timing,
        interrupted,
        tuple(_sampled(request, backends, found)),
    )


def _check(
    request: VerifyRequest,
    device: torch.device,
    backends: tuple[str, ...],
    targets: list[str],
    found: _Found,
    show: Callable[[str], None],
) -> None:
    """Run the checks, and store the results of each finished part in `found`."""

    def keep(title: str, results: list) -> Callable[[JobDone], None]:
        def done(job: JobDone) -> None:
            of_job = job.result if isinstance(job.result, list) else [job.result]
            results.extend(of_job)
            show(f"{title}  {job.number}/{job.total}  {job.name}  {verdict(of_job)}")

        return done

    names, scale_types = request.names, request.scale_types
    group_size = SCALE_TYPES[request.scale_type or DEFAULT_SCALE_TYPE]  # compiled ahead and timed
    with Workers(1 if names else _num_workers(device)) as workers:
        if "triton" in backends:  # they take their time, and nearly always there is work
            workers.start(_load)
        shapes = matrix_shapes() if "triton" in backends else ()
        checks = Checks(shapes, request.fuzz, request.seed, request.sampled)
        progress = keep("kernels", found.kernels)
        kernels = begin_kernels(names, scale_types, device, backends, checks, workers, progress)
        if request.whole_model:  # its jobs follow in the same queue
            progress = keep("model", found.parity)
            model = begin_parity(
                device, backends, scale_types, workers, progress, sampled=request.sampled
            )
        found.kernels = list(kernels().kernels)  # in the order of the kernels
        if request.whole_model:
            found.parity = list(model())
    if request.timed:  # when the other processes are gone
        found.timing = time_kernels(found.kernels, Stopwatch(device), group_size, show)
    if targets:
        progress = keep("compiled", found.compiled)
        number = os.cpu_count() or 1
        found.compiled = list(compile_kernels(names, targets, group_size, number, progress))


def _load() -> None:
    """Import this module in a process, and leave the next such call to another process."""
    time.sleep(0.1)


def _backends(device: torch.device) -> tuple[str, ...]:
    """Return the backends that run on a device, each with code of its own."""
    found = ["triton" if device.type == "cuda" else "interpreter"] if HAS_TRITON else []
    own_loops = device.type == "cpu" and native.available()
    return (*found, "torch", *(["native"] if own_loops else []))


def _num_workers(device: torch.device) -> int:
    """Choose a number of processes; each takes memory of a GPU, too."""
    cores = os.cpu_count() or 1
    if device.type != "cuda":
        return cores
    return max(1, min(cores, GPU_PROCESSES, torch.cuda.mem_get_info(device)[0] >> 32))


def _not_reached(request: VerifyRequest, found: _Found, signal: str) -> Iterable[str]:
    """Return the parts that an interrupted run did not finish."""
    done = {(result.kernel, result.scale_type) for result in found.kernels}
    missing = [
        f"{spec.name} {scale_type}" if scale_type else spec.name
        for spec in find_kernels(request.names)
        for scale_type in (request.scale_types if spec.uses_scales else (None,))
        if (spec.name, scale_type) not in done
    ]
    if missing:
        yield f"stopped by {signal} before these kernels were done: {', '.join(missing)}"
    if request.whole_model:
        yield f"stopped by {signal} after {len(found.parity)} comparisons of the whole model"
    if request.timed and found.timing is None:
        yield f"stopped by {signal} before the kernels were timed"
    if request.targets:
        yield f"stopped by {signal} after {len(found.compiled)} kernels were compiled ahead"


def _of_kernels(request: VerifyRequest) -> Iterable[str]:
    """Return the errors that no check of a kernel can detect, as kernels declare them."""
    for spec in find_kernels(request.names):
        yield from (f"{spec.name}: {item}" for item in spec.not_verified)


def _sampled(request: VerifyRequest, backends: tuple[str, ...], found: _Found) -> Iterable[str]:
    """State the sample that was checked, where it is not all."""
    if not (request.sampled and {*backends} & {*IN_TRITON}):
        return
    again = "all with `--exhaustive`"
    names = [name for name in ALWAYS if name in request.scale_types]
    both = " and ".join(names or request.scale_types)
    in_triton = [result for result in found.kernels if result.backend in IN_TRITON]
    left_out = sum(result.left_out for result in in_triton)
    if left_out:
        cases = sum(len(result.shapes) for result in in_triton)
        where = "in the interpreter"
        if len(request.scale_types) > 1:
            where += f", one of each kind in other types than {both}"
        if "triton" in backends:
            where = (
                "in Triton, and the same in torch: each type, switch and size of tiles of a kernel"
                " is compiled, not each combination of them"
            )
        yield f"{cases:,} of {cases + left_out:,} cases {where}; {again}"
    if len(request.scale_types) > 1:
        met = {(result.kernel, result.scale_type) for result in in_triton}
        types = sum(scale_type is not None for _, scale_type in met)
        every = sum(bool(spec.uses_scales) for spec in find_kernels(request.names))
        every *= len(request.scale_types)
        if types < every:
            also = " and torch" if {"triton", "torch"} <= {*backends} else ""
            yield (
                f"{types} of {every} pairs of kernel and scale type in Triton{also}:"
                f" {' and '.join(ALWAYS)}, and one of each other path that a kernel takes; {again}"
            )
    if request.whole_model and "interpreter" in backends:
        yield (
            f"models in the interpreter: {', '.join(FEW_MODELS)} in one scale type,"
            f" from the bytes on, and each rule in one direction; in torch and in C all of them in"
            f" {both}; {again}"
        )
    elif request.whole_model:
        yield (
            f"models: {', '.join(LARGEST)} in bf16, as they are trained, with up to {SAMPLED_CTX}"
            f" bytes, and small ones in float32 and {both}, of kernels compiled for any number; in"
            f" torch {', '.join(FEW_MODELS)} in one scale type; {again}"
        )


def _not_drawn(found: _Found) -> Iterable[str]:
    """Return the properties that random cases could have had, and never had."""
    missing: dict[str, dict[str, None]] = {}
    for result in found.kernels:
        for what in result.drawn.never if result.drawn else ():
            missing.setdefault(what, {})[result.kernel] = None
    for what, kernels in missing.items():
        yield f"random cases, {what}: none was drawn of {', '.join(kernels)}"


def _left_out(
    request: VerifyRequest, device: torch.device, backends: tuple[str, ...]
) -> Iterable[str]:
    """Return what was not requested or cannot be verified here, and why."""
    if "triton" not in backends:
        yield f"the compiled kernels: nothing ran on a GPU, but on {device.type}"
        yield "bfloat16 in the kernels: Triton's interpreter computes it wrongly"
        yield "the real sizes of the presets: they need a GPU"
    if "native" not in backends:
        asked = device.type != "cpu" or native.available()
        yield f"the native backend: {'it was not asked for' if asked else native.why_not()}"
    if "torch" not in backends:
        yield "the torch backend: another one was asked for"
    if request.names:
        yield "other kernels, and the whole model: kernels were named"
    elif request.fuzz:
        yield "the fixed cases, and the whole model: random cases were asked for"
    else:
        yield "blocks of a preset after its second that are like others: one stands for all"
        yield "causality and determinism of small models in more than one scale type"
        yield (
            "Mamba in bf16 against float64: a gated output near 0 is normalised, and what was"
            " rounded before is most of it"
        )
        if "triton" in backends:
            yield (
                f"contexts of presets beyond {LONGEST:,} bytes, or {SHORTEST} where they have"
                " codebooks: their references take minutes"
            )
            yield (
                "presets where a GPU has less than 96 bytes for each of their weights, and in"
                " float32 less than 480: their references take as many"
            )
            yield "causality and determinism of presets with codebooks: small models stand for them"
        if "interpreter" in backends:
            yield (
                f"small models but those of {', '.join(INTERPRETED)} in the interpreter, and"
                " causality and determinism of these: they take minutes"
            )
    if "triton" in backends and len(request.scale_types) > 1 and not request.fuzz:
        yield (
            "matrices of the presets in each type and by each number of rows, in other scale types"
            f" than {DEFAULT_SCALE_TYPE}: one of these each, in turn"
        )
    missing = [name for name in SCALE_TYPES if name not in request.scale_types]
    if missing:
        yield f"scale types {', '.join(missing)}: `--all-tscale-types` was not given"
    if request.targets:
        yield "whether kernels run on the GPUs that they were only compiled for"
    else:
        yield "compilation for other GPUs: `--targets` was not given"
    yield (
        "presets without codebooks from the bytes on, in bf16 or their gradients: blocks are"
        " compared one by one there"
    )
    yield "float baselines and their optimizers: they are torch's own"
    if not request.timed:
        yield "speed: `--time` was not given"

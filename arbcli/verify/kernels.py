"""Run kernels against their references: what was compared, how closely, and what was not."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.errors import ArbError
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.registry import KERNELS
from arbcli.kernels.runtime.backend import check_backend, chunks_of, use_backend
from arbcli.kernels.runtime.spec import Case, KernelSpec
from arbcli.verify.compare import CaseResult, as_tuple, compare, poisoned, worst
from arbcli.verify.fuzz import Drawn, Tally, fuzz_cases, real_cases, real_reference
from arbcli.verify.workers import JobDone, Workers

METHODS = {
    "cases": "awkward sizes and states, against the reference",
    "real": "matrices of the presets, against float64 or the torch backend, itself verified here",
    "fuzz": "random shapes, strides, offsets, types and states, against the reference",
}
"""By kind of check."""


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What one kind of check of one kernel found, over all its cases."""

    kernel: str
    backend: str
    scale_type: str | None
    """None for a kernel without scales."""
    kind: str
    """A key of `METHODS`."""
    shapes: tuple[str, ...]
    """Labels of the cases."""
    outputs: int
    """Tensors compared."""
    elements: int
    """Elements of them, all of which the reference has too."""
    unwritten: int
    """Elements that still held the poison of uninitialised memory."""
    gate: str
    reason: str
    """Of the gate."""
    unequal: int | None
    """Elements that differ; None unless the gate asks for equality."""
    max_error: float | None
    relative_error: float | None
    """The largest, as the other figures are the worst of all cases; None if it is not finite."""
    cosine: float
    seconds: float
    passed: bool
    failures: tuple[CaseResult, ...]
    drawn: Drawn | None = None
    """What random cases were; None of others."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What the comparison of kernels found."""

    kernels: tuple[KernelResult, ...]
    seconds: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Checks:
    """Which checks to make of each kernel."""

    real_shapes: tuple[tuple[int, int], ...] = ()
    """(N, K) of the matrices of models, for the `triton` backend."""
    fuzz: int = 0
    """Random cases a kernel; where there are any, nothing else is checked."""
    seed: int = 0
    """Of the first random case; each case has the next one."""


def verify_kernels(
    names: Iterable[str],
    group_sizes: Mapping[str, int],
    device: torch.device,
    backends: Iterable[str],
    checks: Checks | None = None,
    workers: Workers | None = None,
    progress: Callable[[JobDone], None] = lambda _: None,
) -> VerifyReport:
    """Compare kernels with their references on all their cases, in poisoned memory.

    Args:
        names: kernels to check; none at all means every one.
        group_sizes: scale types to check, by name.
        device: where to run.
        backends: `triton` or `interpreter`, `torch`, and `native`.
        checks: which of them to make; the fixed cases by default.
        workers: processes that share the work; None is this one.
        progress: is told each kernel that is done, and what it found.

    Raises:
        ArbError: no kernel has one of the names, or a backend cannot run on `device`.
    """
    backends, checks = tuple(backends), checks or Checks()
    chosen = find_kernels(names)
    for backend in backends:
        check_backend(backend, device)
    first = next(iter(group_sizes.values()))
    jobs = [
        (spec.name, scale_type, group_size, str(device), backends, checks)
        for spec in chosen
        for scale_type, group_size in (group_sizes if spec.uses_scales else {None: first}).items()
    ]
    started = time.perf_counter()
    found = (workers or Workers()).map(_verify_job, jobs, progress)
    results = [result for of_job in found for result in of_job]
    return VerifyReport(
        kernels=tuple(results),
        seconds=time.perf_counter() - started,
        passed=all(result.passed for result in results),
    )


def find_kernels(names: Iterable[str]) -> list[KernelSpec]:
    """Find kernels by name; no name at all finds every one.

    Raises:
        ArbError: no kernel has one of the names.
    """
    known = {spec.name: spec for spec in KERNELS}
    names = list(names)
    for name in names:
        if name not in known:
            raise ArbError(
                f"no kernel is named `{name}`",
                hint=f"choose from: {', '.join(f'`{spec}`' for spec in known)}",
            )
    return [known[name] for name in names] or list(KERNELS)


def _verify_job(
    name: str,
    scale_type: str | None,
    group_size: int,
    device_name: str,
    backends: tuple[str, ...],
    checks: Checks,
) -> list[KernelResult]:
    """Make all checks of one kernel with one scale type."""
    (spec,), device = find_kernels([name]), torch.device(device_name)
    if "torch" in backends and spec.native is None:  # it would be the same once more
        backends = tuple(backend for backend in backends if backend != "native")

    def check(kind, cases, reference, backends) -> list[KernelResult]:
        return _verify(spec, kind, scale_type, device, cases, reference, backends)

    with poisoned():
        if checks.fuzz:
            seeds = range(checks.seed, checks.seed + checks.fuzz)
            cases = fuzz_cases(name, device, group_size, seeds)
            return check("fuzz", cases, spec.reference, backends)
        found = check("cases", spec.cases(device, group_size), spec.reference, backends)
        if checks.real_shapes and "triton" in backends:
            cases = real_cases(name, device, group_size, checks.real_shapes)
            found += check("real", cases, real_reference(spec), ("triton",))
        return found


def _verify(
    spec: KernelSpec,
    kind: str,
    scale_type: str | None,
    device: torch.device,
    cases: Iterable[Case],
    reference: Callable,
    backends: tuple[str, ...],
) -> list[KernelResult]:
    """Run cases on every backend; one at a time, as some are large."""
    labels: list[str] = []
    tally = Tally(spec.name) if kind == "fuzz" else None
    found: dict[str, list[CaseResult]] = {backend: [] for backend in backends}
    seconds = dict.fromkeys(backends, 0.0)
    for case in cases:
        labels.append(case.label)
        if tally:
            tally.add(case)
        wanted = as_tuple(reference(*copies(case.inputs)))
        peers = as_tuple(case.peer(*copies(case.inputs))) if case.peer else (None,) * len(wanted)
        for backend in backends:
            started = time.perf_counter()
            found[backend] += _run_case(spec, case, backend, device, wanted, peers)
            seconds[backend] += time.perf_counter() - started
    return [
        KernelResult(
            kernel=spec.name,
            backend=backend,
            scale_type=scale_type,
            kind=kind,
            shapes=tuple(labels),
            outputs=len(results),
            elements=sum(result.elements for result in results),
            unwritten=sum(result.unwritten for result in results),
            gate=spec.gate.text,
            reason=spec.gate.reason,
            unequal=sum(result.unequal for result in results) if spec.gate.exact else None,
            max_error=worst(result.max_error for result in results),
            relative_error=worst(result.relative_error for result in results),
            cosine=min(result.cosine for result in results),
            seconds=seconds[backend],
            passed=all(result.passed for result in results),
            failures=tuple(result for result in results if not result.passed),
            drawn=tally.drawn() if tally else None,
        )
        for backend, results in found.items()
    ]


def _run_case(
    spec: KernelSpec,
    case: Case,
    backend: str,
    device: torch.device,
    wanted: tuple[Tensor, ...],
    peers: tuple[Tensor | None, ...],
) -> list[CaseResult]:
    run = spec.run(backend)
    try:
        with use_backend(backend), chunks_of(case.chunk_elements):
            got = as_tuple(run(*copies(case.inputs)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # a kernel that raises has failed its case, and only that
        return [CaseResult.of_error(case.label, error, wanted)]
    return [
        compare(spec, case.label, result, expected, peer)
        for result, expected, peer in zip(got, wanted, peers, strict=True)
    ]


def copies(inputs: tuple) -> tuple:
    """Clone the tensors of a case with their strides and offsets, so none is changed by a run."""
    return tuple(map(_copy, inputs))


def _copy(value: object) -> object:
    if isinstance(value, Packed):
        return value.map(_copy)
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().clone()
    like = torch.empty(0, dtype=value.dtype, device=value.device)
    return like.set_(storage, value.storage_offset(), value.size(), value.stride())

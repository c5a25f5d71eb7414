"""Compare kernels with their references, and report coverage and errors."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from arbcli.inspect.trace import on_host, without_memory
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.backend import (
    check_backend,
    chunks_of,
    compile_for,
    gpu_of,
    use_backend,
)
from arbcli.verify.case_generator import CaseGenerator, ShapeGenerator
from arbcli.verify.compare import CaseResult, as_tuple, compare, poisoned, worst
from arbcli.verify.fuzz import (
    Drawn,
    Tally,
    fuzz_cases,
    real_cases,
    real_reference,
    real_rows,
)
from arbcli.verify.names import check_kernel_names
from arbcli.verify.registry import KERNELS
from arbcli.verify.sample import (
    ALWAYS,
    DEFAULT_SCALE_TYPE,
    IN_TRITON,
    OF_VALUES,
    CompiledSample,
    is_long,
    kind_of,
    sampled_scale_types,
)
from arbcli.verify.variants import compile_launch
from arbcli.verify.verification import Case, Verification
from arbcli.verify.workers import JobDone, Workers, name_of

METHODS = {
    "cases": "awkward sizes and states, against the reference",
    "real": "matrices of the presets, against float64 or the torch backend, itself verified here",
    "fuzz": "random shapes, strides, offsets, types and states, against the reference",
}
"""Descriptions of the checks by kind."""
SHARES = 4
"""Number of processes on a GPU that share the cases of a kernel without scales (kernels with scales
are shared by scale type), and the compilation of a slow kernel."""
SLOWEST = (
    "fp8_matmul", "compressed_attention_backward", "decode_e4m3", "attend_ahead",
    "compressed_attention", "gradient_statistics", "decode_attention", "decode_digits",
    "weighted_rows", "weighted_rows_grad_weights", "causal_attention_backward",
    "rotary_attention_backward", "gated_rms_norm_backward", "decode_attention_8bit",
    "embedding_rows", "append_position_8bit", "append_position", "prepacked_rows",
    "row_matmul", "decode_compressed", "cross_entropy", "cross_entropy_backward",
    "boundary_scores_backward", "stream_weights_backward", "decode_weight", "quantise_gradient",
    "decode_latent", "gram_polynomial", "sign_gradient", "smooth_chunks_backward",
    "gated_rms_norm", "rms_norm_backward", "int8_matmul",
)  # fmt: skip
"""The slowest kernels, in descending order, which begin first."""
FIRST_CALLS, FIRST_CHECKS, LAST_CHECKS = -1, 0, 2
"""Priorities of compilations ahead, of these and of other kernels. Processes compile kernels of
models in between, so that fewer of them wait for the GPU at the same time."""
LARGE = 1 << 15
"""Minimum number of input elements of a case that a GPU compares like those of real matrices."""
SHARED = 12
"""Number of the slowest kernels whose compilation several processes share."""


@dataclass(frozen=True, slots=True)
class KernelResult:
    """Result of a kind of check of a kernel, over all its cases."""

    kernel: str
    backend: str
    scale_type: str | None
    """None for a kernel without scales."""
    kind: str
    """A key of `METHODS`."""
    shapes: tuple[str, ...]
    """Labels of the compared cases."""
    outputs: int
    """Number of compared tensors."""
    elements: int
    """Number of their elements, which is that of the reference."""
    unwritten: int
    """Number of elements that the kernel did not write."""
    gate: str
    reason: str
    """Reason for the gate."""
    unequal: int | None
    """Number of elements that differ; None unless the gate is equality."""
    max_error: float | None
    relative_error: float | None
    """Largest absolute error of all cases; None if it is not finite."""
    cosine: float
    seconds: float
    passed: bool
    failures: tuple[CaseResult, ...]
    drawn: Drawn | None = None
    """Coverage of random cases; None for other checks."""
    left_out: int = 0
    """Number of cases that the sample omits."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Results of the comparison of kernels."""

    kernels: tuple[KernelResult, ...]
    seconds: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of each kernel to run."""

    real_shapes: tuple[tuple[int, int], ...] = ()
    """(N, K) of the matrices of models, for the `triton` backend."""
    fuzz: int = 0
    """Number of random cases per kernel; if there are any, no other checks run."""
    seed: int = 0
    """Seed of the first random case; it increases by 1 for each case."""
    sampled: bool = False
    """Whether Triton kernels only run for some scale types, on a GPU with some cases, and in the
    interpreter with some of the fixed cases."""


def verify_kernels(*args: Any, **kwargs: Any) -> VerifyReport:
    """Compare kernels with their references, and wait for the results; see `begin_kernels`."""
    return begin_kernels(*args, **kwargs)()


def begin_kernels(
    names: Iterable[str],
    group_sizes: Mapping[str, int],
    device: torch.device,
    backends: Iterable[str],
    checks: Checks | None = None,
    workers: Workers | None = None,
    progress: Callable[[JobDone], None] = lambda _: None,
) -> Callable[[], VerifyReport]:
    """Begin to compare kernels with their references on their cases, in poisoned memory.

    Args:
        names: kernels to check; none at all means every one.
        group_sizes: scale types to check, by name.
        device: device to run on.
        backends: `triton` or `interpreter`, `torch`, and `native`.
        checks: checks to run; the fixed cases by default.
        workers: processes that share the work; None is this one.
        progress: called for each finished kernel, with its results.

    Returns:
        Waits, and returns what was found.

    Raises:
        ArbError: no kernel has one of the names, or a backend cannot run on `device`.
    """
    backends, checks = tuple(backends), checks or Checks()
    chosen = find_kernels(names)
    for backend in backends:
        check_backend(backend, device)
    parts = _parts(chosen, group_sizes, device, backends, checks)
    started = time.perf_counter()
    jobs = _jobs(parts, checks)
    whole_jobs = _WholeJobs(jobs, progress)
    workers = workers or Workers()
    workers.begin_ahead((call for job in jobs for call in _ahead(job)), FIRST_CALLS)
    batch = workers.begin(_verify_parts, jobs, whole_jobs.add, _turn)

    def report() -> VerifyReport:
        workers.finish(batch)
        results = [
            result
            for spec in chosen
            for scale_type in (group_sizes if spec.uses_scales else (None,))
            for result in whole_jobs.found.get((spec.name, scale_type), [])
        ]
        return VerifyReport(
            kernels=tuple(results),
            seconds=time.perf_counter() - started,
            passed=all(result.passed for result in results),
        )

    return report


def find_kernels(names: Iterable[str]) -> list[Verification]:
    """Return kernels by name; without names, all kernels.

    Raises:
        ArbError: no kernel has one of the names.
    """
    names = list(names)
    check_kernel_names(names)
    known = {spec.name: spec for spec in KERNELS}
    return [known[name] for name in names] or list(KERNELS)


@dataclass(frozen=True, slots=True)
class _Part:
    """A job: some of the cases of a kernel with one scale type."""

    kernel: str
    scale_type: str | None
    group_size: int
    device: str
    backends: tuple[str, ...]
    checks: Checks
    index: int
    """Index of the part among those of the kernel and scale type."""
    kind: str
    share: tuple[int, int] = (0, 1)
    """Share of the fixed cases: its index, and the number of shares."""
    rows: int | None = None
    """Rows of the matrices of models; with `turn` as in `real_cases`."""
    turn: int | None = None


def _parts(
    chosen: Iterable[Verification],
    group_sizes: Mapping[str, int],
    device: torch.device,
    backends: tuple[str, ...],
    checks: Checks,
) -> list[_Part]:
    """Return the parts of all checks, the slowest first."""
    first = next(iter(group_sizes.values()))
    whole = DEFAULT_SCALE_TYPE if DEFAULT_SCALE_TYPE in group_sizes else next(iter(group_sizes))
    turns = {name: turn for turn, name in enumerate(n for n in group_sizes if n != whole)}
    # what a GPU runs in torch has the sample of what it runs in Triton
    others = tuple(b for b in backends if b not in IN_TRITON and "triton" not in backends)
    parts = []
    for spec in chosen:
        in_triton: tuple[str | None, ...] = (*group_sizes, None)
        if spec.uses_scales and checks.sampled and not checks.fuzz:
            in_triton = sampled_scale_types(spec, group_sizes)
        for name, size in (group_sizes if spec.uses_scales else {None: first}).items():
            run_on = backends if name in in_triton else others
            if not run_on:
                continue
            shares = _shares(spec, run_on, checks, turns.get(name) if name else None)
            parts += [
                _Part(spec.name, name, size, str(device), run_on, checks, index, *share)
                for index, share in enumerate(shares)
            ]
    rank = {name: place for place, name in enumerate(SLOWEST)}
    # first a part of each kernel: others of the same kernel would wait for what it compiles
    parts.sort(key=lambda part: (part.index, rank.get(part.kernel, len(SLOWEST))))
    return parts


def _jobs(parts: list[_Part], checks: Checks) -> list[tuple]:
    """Convert parts to jobs in the same order: (kernel, scale type, part, ...).

    Where what a GPU compiles for a kernel is sampled, that is one job, of all scale types: those of
    every sample first.
    """
    jobs: dict[Hashable, list[_Part]] = {}
    for part in parts:
        together = checks.sampled and "triton" in part.backends and part.kind != "fuzz"
        jobs.setdefault(part.kernel if together else part, []).append(part)
    for of_job in jobs.values():
        of_job.sort(key=lambda part: (part.kind != "cases", part.scale_type not in ALWAYS))
    return [
        (of_job[0].kernel, of_job[0].scale_type if len(of_job) == 1 else None, *of_job)
        for of_job in jobs.values()
    ]


def _turn(job: tuple) -> int:
    """Return the priority of a job: slow kernels, then kernels of models, then the others."""
    return FIRST_CHECKS if job[0] in SLOWEST else LAST_CHECKS


def _ahead(job: tuple) -> Iterable[tuple]:
    """Yield calls that compile shares of the kernels of a slow job."""
    (kernel, _, *parts) = job
    if kernel in SLOWEST[:SHARED] and len(parts) > 1:
        for index in range(SHARES):
            yield _compile_share, kernel, index, *parts


def _compile_share(kernel: str, index: int, *parts: _Part) -> None:
    """Compile a share of a kernel's variants for its sample of cases."""
    (spec,) = find_kernels([kernel])
    # checks will tell what is wrong
    with suppress(Exception), _without_gpu(spec, parts[0]) as rng:
        for launch in _compiled_sample(spec, parts, rng).launches()[index::SHARES]:
            compile_launch(launch)


@contextmanager
def _without_gpu(spec: Verification, part: _Part) -> Iterator[type[CaseGenerator]]:
    """Choose samples on the host, as processes that share a GPU would wait for each other."""
    device = torch.device(part.device)
    if device.type != "cuda":
        yield CaseGenerator
        return
    place = on_host if spec.name in OF_VALUES else without_memory
    with compile_for(*gpu_of(device)), place(device):
        yield ShapeGenerator


def _compiled_sample(
    spec: Verification, parts: Iterable[_Part], rng: type[CaseGenerator] = CaseGenerator
) -> CompiledSample:
    """Choose cases of a kernel for a GPU by the variants that they compile."""
    sample = CompiledSample(spec)
    for part in parts:
        for case in _cases(spec, part, partial(sample.may_take, part), rng):
            with use_backend("triton"):
                run = partial(_run_on_copies, spec.triton, case)
                sample.offer(part, case.label, run, fixed=part.kind == "cases")
    sample.choose()
    return sample


def _shares(
    spec: Verification, backends: tuple[str, ...], checks: Checks, turn: int | None
) -> Iterable[tuple]:
    """Divide the checks of a kernel: yield the last fields of each part."""
    if checks.fuzz:
        yield ("fuzz",)
        return
    several = "triton" in backends and not spec.uses_scales and not checks.sampled
    shares = SHARES if several else 1
    for share in range(shares):
        yield "cases", (share, shares)
    if checks.real_shapes and "triton" in backends:
        for rows in real_rows(spec.name):
            yield "real", (0, 1), rows, turn


class _WholeJobs:
    """Collects the results of jobs by kernel and scale type, and reports complete ones.

    Args:
        jobs: all of them, as `_jobs` makes them.
        progress: called for each finished kernel and scale type, with the results.
    """

    def __init__(self, jobs: list[tuple], progress: Callable[[JobDone], None]) -> None:
        self.progress = progress
        self.found: dict[tuple[str, str | None], list[KernelResult]] = {}
        self.missing: dict[tuple[str, str | None], dict[tuple, list[KernelResult] | None]] = {}
        for job in jobs:
            for part in job[2:]:
                self.missing.setdefault((part.kernel, part.scale_type), {})[job] = None
        self.total = len(self.missing)

    def add(self, job: JobDone) -> None:
        """Store the result of a job."""
        for key in dict.fromkeys((part.kernel, part.scale_type) for part in job.arguments[2:]):
            of_jobs = self.missing[key]
            of_jobs[job.arguments] = [found for found in job.result if found.scale_type == key[1]]
            done = [each for each in of_jobs.values() if each is not None]
            if len(done) < len(of_jobs):
                continue
            merged = _merged([result for each in done for result in each])
            self.found[key] = merged
            self.progress(
                replace(
                    job,
                    number=len(self.found),
                    total=self.total,
                    name=name_of(key),
                    result=merged,
                )
            )


def _merged(results: list[KernelResult]) -> list[KernelResult]:
    """Merge results of the same kind and backend, in the order of first occurrence."""
    groups: dict[tuple[str, str], list[KernelResult]] = {}
    for result in results:
        groups.setdefault((result.kind, result.backend), []).append(result)
    return [
        replace(
            each[0],
            shapes=tuple(shape for result in each for shape in result.shapes),
            outputs=sum(result.outputs for result in each),
            elements=sum(result.elements for result in each),
            unwritten=sum(result.unwritten for result in each),
            unequal=None if each[0].unequal is None else sum(r.unequal or 0 for r in each),
            max_error=worst(result.max_error for result in each),
            relative_error=worst(result.relative_error for result in each),
            cosine=min(result.cosine for result in each),
            seconds=sum(result.seconds for result in each),
            passed=all(result.passed for result in each),
            failures=tuple(failure for result in each for failure in result.failures),
            left_out=sum(result.left_out for result in each),
        )
        for each in groups.values()
    ]


def _verify_parts(_kernel: str, _scale_type: str | None, *parts: _Part) -> list[KernelResult]:
    """Check a kernel on some of its cases."""
    (spec,), sample = find_kernels([parts[0].kernel]), None
    if parts[0].checks.sampled and "triton" in parts[0].backends and parts[0].kind != "fuzz":
        with _without_gpu(spec, parts[0]) as rng:
            sample = _compiled_sample(spec, parts, rng)
    return [result for part in parts for result in _verify_part(spec, part, sample)]


def _verify_part(
    spec: Verification, part: _Part, sample: CompiledSample | None
) -> list[KernelResult]:
    device, backends, reference = torch.device(part.device), part.backends, spec.reference
    if "torch" in backends and spec.native is None:  # it would be the same once more
        backends = tuple(backend for backend in backends if backend != "native")
    if part.kind == "real":
        reference, backends = real_reference(spec), ("triton",)
    with poisoned():
        cases = _cases(spec, part, partial(sample.has, part)) if sample else _cases(spec, part)
        results = _verify(spec, part, device, cases, reference, backends, sample)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the other processes
    return results


def _cases(
    spec: Verification,
    part: _Part,
    wanted: Callable[[str], bool] = lambda _: True,
    rng: type[CaseGenerator] = CaseGenerator,
) -> Iterable[Case]:
    """Draw the cases of a part; of real matrices only the wanted ones."""
    device, size, checks = torch.device(part.device), part.group_size, part.checks
    if part.kind == "fuzz":
        seeds = range(checks.seed, checks.seed + checks.fuzz)
        return fuzz_cases(spec.name, device, size, seeds)
    if part.kind == "cases":
        first, step = part.share
        return islice(spec.cases(device, size), first, None, step)
    return real_cases(
        spec.name, device, size, checks.real_shapes, part.rows, part.turn, rng, wanted
    )


def _verify(
    spec: Verification,
    part: _Part,
    device: torch.device,
    cases: Iterable[Case],
    reference: Callable,
    backends: tuple[str, ...],
    sample: CompiledSample | None,
) -> list[KernelResult]:
    """Run cases one at a time, as some are large, on every backend."""
    labels: dict[str, list[str]] = {backend: [] for backend in backends}
    left_out = dict.fromkeys(backends, 0)
    tally = Tally(spec.name) if part.kind == "fuzz" else None
    found: dict[str, list[CaseResult]] = {backend: [] for backend in backends}
    seconds, kinds = dict.fromkeys(backends, 0.0), set[str]()
    for case in cases:
        if tally:
            tally.add(case)
        chosen = [b for b in backends if _is_chosen(spec, part, case, b, sample, kinds)]
        for backend in {*backends} - {*chosen}:
            left_out[backend] += 1
        if not chosen:
            continue
        wanted = _expected(spec, part, case, reference)
        peers = peers_of(spec, case, len(wanted))
        for backend in chosen:
            labels[backend].append(case.label)
            started = time.perf_counter()
            found[backend] += _run_case(spec, case, backend, device, wanted, peers)
            seconds[backend] += time.perf_counter() - started
    if sample and part.kind == "real":
        left_out["triton"] += sample.not_drawn
        sample.not_drawn = 0
    return [
        KernelResult(
            kernel=spec.name,
            backend=backend,
            scale_type=part.scale_type,
            kind=part.kind,
            shapes=tuple(labels[backend]),
            outputs=len(results),
            elements=sum(result.elements for result in results),
            unwritten=sum(result.unwritten for result in results),
            gate=spec.gate.text,
            reason=spec.gate.reason,
            unequal=sum(result.unequal for result in results) if spec.gate.exact else None,
            max_error=worst(result.max_error for result in results),
            relative_error=worst(result.relative_error for result in results),
            cosine=min((result.cosine for result in results), default=1.0),
            seconds=seconds[backend],
            passed=all(result.passed for result in results),
            failures=tuple(result for result in results if not result.passed),
            drawn=tally.drawn() if tally else None,
            left_out=left_out[backend],
        )
        for backend, results in found.items()
        if results or left_out[backend]
    ]


def _expected(
    spec: Verification, part: _Part, case: Case, reference: Callable
) -> tuple[Tensor, ...]:
    """Compute the results of the reference.

    Processes that share a GPU wait for one another at each of its many small operations. So it runs
    on the host, and large cases of a GPU have the reference of real matrices, if there is one.
    """
    inputs, device = copies(case.inputs), torch.device(part.device)
    if part.kind == "real" or device.type == "cpu":
        return as_tuple(reference(*inputs))
    if _size(inputs) > LARGE:
        reference = spec.large_reference or reference
    return as_tuple(reference(*_moved(inputs, torch.device("cpu"))))


def _run_on_copies(run: Callable, case: Case) -> object:
    return run(*copies(case.inputs))


def _size(inputs: tuple) -> int:
    """Count the elements of all tensors."""
    tensors = (x for x in inputs if isinstance(x, Tensor | tuple))
    return sum(_size(x) if isinstance(x, tuple) else x.numel() for x in tensors)


def _moved(inputs: tuple, device: torch.device) -> tuple:
    """Copy tensors to a device, with the strides of new tensors."""
    moved = [
        _moved(x, device)
        if isinstance(x, tuple)
        else x.to(device)
        if isinstance(x, Tensor)
        else device
        if isinstance(x, torch.device)
        else x
        for x in inputs
    ]
    return getattr(inputs, "_make", tuple)(moved)  # of a named tuple, its own kind


def _is_chosen(
    spec: Verification,
    part: _Part,
    case: Case,
    backend: str,
    sample: CompiledSample | None,
    kinds: set[str],
) -> bool:
    """Return whether a case is in the sample of a backend; torch on a GPU uses that of Triton.

    In scale types of further paths the interpreter has the first case of each of `kinds`.
    """
    if sample is not None:
        return (part, case.label) in sample.chosen
    if part.checks.sampled and part.kind == "cases" and backend == "interpreter":
        new = part.scale_type in (None, *ALWAYS) or kind_of(case.label) not in kinds
        kinds.add(kind_of(case.label))
        return new and not is_long(spec.name, case.label)
    return True


def _run_case(
    spec: Verification,
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
        compare(
            spec,
            case.label,
            result.to(expected.device),
            expected,
            None if peer is None else peer.to(expected.device),
        )
        for result, expected, peer in zip(got, wanted, peers, strict=True)
    ]


def peers_of(spec: Verification, case: Case, number: int) -> tuple[Tensor | None, ...]:
    """Compute the results of the peer, whose errors excuse those of bf16 inputs."""
    low = any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in case.inputs)
    return as_tuple(spec.peer(*copies(case.inputs))) if low and spec.peer else (None,) * number


def copies(inputs: tuple) -> tuple:
    """Clone the tensors of a case with their strides and offsets, as a run may change them."""
    return tuple(map(_copy, inputs))


def _copy(value: Any) -> Any:
    if isinstance(value, Packed):
        return value.map(_copy)
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().clone()
    like = torch.empty(0, dtype=value.dtype, device=value.device)
    return like.set_(storage, value.storage_offset(), value.size(), value.stride())

"""Comparison of kernels with their references, case by case, in poisoned memory."""

import inspect
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.backend import check_backend, chunks_of, use_backend
from arbcli.verify.cases import production_cases, random_cases
from arbcli.verify.compare import CaseResult, as_tuple, compare, poisoned, worst
from arbcli.verify.names import check_kernel_names
from arbcli.verify.registry import KERNELS
from arbcli.verify.scale_types import TRITON_BACKENDS, verified_scale_types
from arbcli.verify.variants import Variant, general_launches, recorded_launches, variant_of
from arbcli.verify.verification import Case, Verification

METHODS = {
    "cases": "random sizes, layouts and states, and special values, against the reference",
    "real": "the largest matrix of `1b`, against float64 or the torch backend, verified here",
    "fuzz": "random shapes, strides, offsets, types and states, against the reference",
}
"""Descriptions of the checks by kind."""
LARGE = 1 << 15
"""Minimum number of input elements of a case that a GPU compares like those of presets."""


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
    left_out: int
    """Number of cases that this backend did not run."""


@dataclass(frozen=True, slots=True)
class KernelJob:
    """Checks of a kernel that one process runs."""

    kernel: str
    group_sizes: Mapping[str | None, int]
    """Scale types, and how many weights share a scale; None for a kernel without scales."""
    device: torch.device
    backends: tuple[str, ...]
    fuzz: int
    """Number of random cases; if there are any, no other checks run."""
    seed: int
    """Seed of the first random case; it increases by 1 for each case."""
    sampled: bool
    """Whether Triton leaves out cases."""

    @property
    def title(self) -> str:
        """Name of the job in progress lines."""
        scale_types = [name for name in self.group_sizes if name is not None]
        return " ".join([self.kernel, *(scale_types if len(scale_types) == 1 else ())])


def find_kernels(names: Iterable[str]) -> list[Verification]:
    """Return kernels by name; without names, all kernels.

    Raises:
        ArbError: no kernel has one of the names.
    """
    names = list(names)
    check_kernel_names(names)
    known = {spec.name: spec for spec in KERNELS}
    return [known[name] for name in dict.fromkeys(names)] or list(KERNELS)


def kernel_jobs(
    names: Iterable[str],
    group_sizes: Mapping[str, int],
    device: torch.device,
    backends: Iterable[str],
    *,
    fuzz: int = 0,
    seed: int = 0,
    sampled: bool = False,
) -> list[KernelJob]:
    """List the checks of kernels.

    Args:
        names: kernels to check; none at all means every one.
        group_sizes: scale types to check, by name.
        device: device to run on.
        backends: `triton` or `interpreter`, `torch`, and `native`.
        fuzz: number of random cases per kernel, instead of all other checks.
        seed: seed of the first one.
        sampled: whether Triton leaves out scale types that take no other path, and on a GPU cases:
            see `CompiledCases`.

    Raises:
        ArbError: no kernel has one of the names, or a backend cannot run on `device`.
    """
    backends = tuple(backends)
    for backend in backends:
        check_backend(backend, device)
    jobs = []
    for spec in find_kernels(names):
        sizes: dict[str | None, int] = dict(group_sizes.items())
        if not spec.uses_scales:
            sizes = {None: next(iter(group_sizes.values()))}
        chosen: tuple[str | None, ...] = tuple(sizes)
        if spec.uses_scales and sampled:
            chosen = verified_scale_types(spec, group_sizes)
        if "triton" in backends:  # in one process: a variant is compiled for several scale types
            parts = [({name: sizes[name] for name in chosen}, backends)]
        else:
            others = tuple(backend for backend in backends if backend not in TRITON_BACKENDS)
            parts = [
                ({name: size}, backends if name in chosen else others)
                for name, size in sizes.items()
            ]
        jobs += [
            KernelJob(spec.name, part, device, run_on, fuzz, seed, sampled)
            for part, run_on in parts
            if run_on
        ]
    if "triton" in backends:  # the longest code first, as it takes longest to compile
        jobs.sort(key=lambda job: -_code_length(job.kernel))
    return jobs


def _code_length(kernel: str) -> int:
    (spec,) = find_kernels([kernel])
    return len(inspect.getsource(sys.modules[spec.triton.__module__]))


def check_kernel(job: KernelJob) -> list[KernelResult]:
    """Compare a kernel with its reference on every case of a job."""
    (spec,), backends = find_kernels([job.kernel]), job.backends
    if "torch" in backends and spec.native is None:  # it would be the same once more
        backends = tuple(backend for backend in backends if backend != "native")
    compiled = CompiledCases(spec) if job.sampled and "triton" in backends else None
    results = []
    for scale_type, group_size in job.group_sizes.items():
        for kind, cases in _cases(spec, job, scale_type, group_size):
            check = _Check(spec, kind, job.device, compiled)
            run_on = ("triton",) if kind == "real" else backends
            with poisoned():
                results += check.results(scale_type, cases, run_on)
    if job.device.type == "cuda":
        torch.cuda.empty_cache()  # for the other processes
    return results


def _cases(
    spec: Verification, job: KernelJob, scale_type: str | None, group_size: int
) -> Iterator[tuple[str, Iterable[Case]]]:
    """Yield kinds of checks, and their cases; these are drawn one at a time, as some are large."""
    if job.fuzz:
        seeds = range(job.seed, job.seed + job.fuzz)
        yield "fuzz", random_cases(spec, job.device, group_size, seeds)
        return
    yield "cases", spec.cases(job.device, group_size)
    # large matrices of other scale types are those of the same kernels, and take as long
    if "triton" in job.backends and scale_type in (None, next(iter(job.group_sizes))):
        yield "real", production_cases(spec, job.device, group_size)


class CompiledCases:
    """Chooses the cases that a GPU runs, as compiling takes longer than all else.

    A case runs if nothing is compiled for it that was not before, or if it shows something new: a
    type, a switch, a number of warps, or a size of tiles, up to a factor of 8. So each of these is
    compiled, but not each combination.

    Args:
        spec: verification of the kernel.
    """

    def __init__(self, spec: Verification) -> None:
        self._others = {other.triton.__module__ for other in KERNELS} - {spec.triton.__module__}
        self._compiled: set[str] = set()
        self._facts: set[Hashable] = set()

    def wants(self, run: Callable[[], object]) -> bool:
        """Return whether to run a case.

        Args:
            run: launches its kernels, which is recorded and not done.
        """
        variants: list[Variant] = []
        with recorded_launches(lambda launch: variants.append(variant_of(launch, generally=True))):
            try:
                run()
            except Exception:  # a launcher that reads results, of which there are none
                return True
        # kernels that others verify are compiled for them
        judged = [v for v in variants if v.function.fn.__module__ not in self._others] or variants
        facts = {fact for variant in judged for fact in _facts(variant)}
        keys = {variant.key for variant in variants}
        if facts <= self._facts and not keys <= self._compiled:
            return False
        self._facts |= facts
        self._compiled |= keys
        return True


def _facts(variant: Variant) -> Iterator[Hashable]:
    """Yield the properties of a variant, one by one."""
    name = variant.function.fn.__name__
    for key, kind in variant.signature.items():
        if kind != "constexpr":
            yield name, key, str(kind)
    for key, value in variant.constants.items():
        size = type(value) is int and value > 1
        yield name, str(key), f"size {value.bit_length() // 3}" if size else str(value)
    for key, value in variant.options.items():
        yield name, key, str(value)


@dataclass(frozen=True, slots=True)
class _Check:
    """A kind of check of a kernel on a device."""

    spec: Verification
    kind: str
    device: torch.device
    compiled: CompiledCases | None
    """Choice of the cases that run on a GPU; None runs all."""

    def results(
        self, scale_type: str | None, cases: Iterable[Case], backends: tuple[str, ...]
    ) -> list[KernelResult]:
        """Run every case on every backend."""
        compared: dict[str, list[CaseResult]] = {backend: [] for backend in backends}
        labels: dict[str, list[str]] = {backend: [] for backend in backends}
        seconds, left_out = dict.fromkeys(backends, 0.0), 0
        for case in cases:
            if not self._runs(case):
                left_out += 1
                continue
            expected = self._expected(case)
            peers = peers_of(self.spec, case, len(expected))
            terms = terms_of(self.spec, case, len(expected))
            for backend in backends:
                started = time.perf_counter()
                compared[backend] += self._compare(case, backend, expected, peers, terms)
                seconds[backend] += time.perf_counter() - started
                labels[backend].append(case.label)
        gate = self.spec.gate
        return [
            KernelResult(
                kernel=self.spec.name,
                backend=backend,
                scale_type=scale_type,
                kind=self.kind,
                shapes=tuple(labels[backend]),
                outputs=len(results),
                elements=sum(result.elements for result in results),
                unwritten=sum(result.unwritten for result in results),
                gate=gate.text,
                reason=gate.reason,
                unequal=sum(result.unequal for result in results) if gate.exact else None,
                max_error=worst(result.max_error for result in results),
                relative_error=worst(result.relative_error for result in results),
                cosine=min((result.cosine for result in results), default=1.0),
                seconds=seconds[backend],
                passed=all(result.passed for result in results),
                failures=tuple(result for result in results if not result.passed),
                left_out=left_out,
            )
            for backend, results in compared.items()
            if results or left_out
        ]

    def _runs(self, case: Case) -> bool:
        """Return whether a case runs; torch on a GPU runs those of Triton."""
        if self.compiled is None or self.kind != "cases":
            return True
        with use_backend("triton"):
            return self.compiled.wants(lambda: self.spec.triton(*copies(case.inputs)))

    def _expected(self, case: Case) -> tuple[Tensor, ...]:
        """Compute the results of the reference.

        Processes that share a GPU wait for one another at each of its many small operations. So it
        runs on the host, and large cases of a GPU have another reference, if there is one.
        """
        spec, inputs, reference = self.spec, copies(case.inputs), self.spec.reference
        if self.kind == "real":
            exact = spec.torch if spec.gate.exact else reference
            return as_tuple((spec.large_reference or exact)(*inputs))
        if self.device.type == "cpu":
            return as_tuple(reference(*inputs))
        if spec.large_reference and _size(inputs) > LARGE:
            reference = spec.large_reference
        return as_tuple(reference(*_moved(inputs, torch.device("cpu"))))

    def _compare(
        self,
        case: Case,
        backend: str,
        references: tuple[Tensor, ...],
        peers: tuple[Tensor | None, ...],
        terms: tuple[Tensor | None, ...],
    ) -> list[CaseResult]:
        """Run a case on a backend, and compare its results.

        Only matrices of presets run as they are compiled for their sizes.
        """
        run, is_general = self.spec.run(backend), backend == "triton" and self.kind != "real"
        try:
            with (
                use_backend(backend),
                chunks_of(case.chunk_elements),
                general_launches() if is_general else nullcontext(),
            ):
                results = as_tuple(run(*copies(case.inputs)))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:  # a kernel that raises has failed its case, and only that
            return [CaseResult.failed(case.label, error, references)]
        return [
            compare(
                self.spec,
                case.label,
                result.to(expected.device),
                expected,
                None if peer is None else peer.to(expected.device),
                term,
            )
            for result, expected, peer, term in zip(results, references, peers, terms, strict=True)
        ]


def _size(inputs: tuple) -> int:
    """Count the elements of all tensors."""
    tensors = (x for x in inputs if isinstance(x, Tensor | tuple))
    return sum(_size(x) if isinstance(x, tuple) else x.numel() for x in tensors)


def _moved(value: Any, device: torch.device) -> Any:
    """Copy the tensors of inputs to a device, with the strides of new tensors."""
    if isinstance(value, tuple):
        moved = [_moved(item, device) for item in value]
        return getattr(value, "_make", tuple)(moved)  # of a named tuple, its own kind
    if isinstance(value, torch.device):
        return device
    return value.to(device) if isinstance(value, Tensor) else value


def peers_of(spec: Verification, case: Case, number: int) -> tuple[Tensor | None, ...]:
    """Compute the results of the peer, whose errors excuse those of bf16 inputs."""
    low = any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in case.inputs)
    return as_tuple(spec.peer(*copies(case.inputs))) if low and spec.peer else (None,) * number


def terms_of(spec: Verification, case: Case, number: int) -> tuple[Tensor | None, ...]:
    """Compute the terms that the results sum, of kernels whose terms may cancel."""
    return as_tuple(spec.terms(*copies(case.inputs))) if spec.terms else (None,) * number


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

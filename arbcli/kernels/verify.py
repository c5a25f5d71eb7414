"""Run kernels against their references: what was compared, how closely, and what was not."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.errors import ArbError
from arbcli.kernels.backend import check_backend, use_backend
from arbcli.kernels.blend_moment import BLEND_MOMENT
from arbcli.kernels.cast_votes import CAST_SCALE_VOTES, CAST_TRIT_VOTES
from arbcli.kernels.decode_weight import DECODE_WEIGHT
from arbcli.kernels.factored_statistics import AVERAGE_STATISTIC, MEAN_SQUARES
from arbcli.kernels.packing import PACK_TRITS, UNPACK_TRITS
from arbcli.kernels.rms_norm import RMS_NORM, RMS_NORM_GRAD_X
from arbcli.kernels.scale_slope import SCALE_SLOPE
from arbcli.kernels.spec import Case, KernelSpec
from arbcli.kernels.step_scales import STEP_SCALES
from arbcli.kernels.step_trits import STEP_TRITS
from arbcli.kernels.ternary_embedding import EMBEDDING_GRAD, EMBEDDING_ROWS
from arbcli.kernels.ternary_matmul import TERNARY_MATMUL, TERNARY_MATMUL_GRAD_X

KERNELS: tuple[KernelSpec, ...] = (
    PACK_TRITS,
    UNPACK_TRITS,
    DECODE_WEIGHT,
    TERNARY_MATMUL,
    TERNARY_MATMUL_GRAD_X,
    RMS_NORM,
    RMS_NORM_GRAD_X,
    EMBEDDING_ROWS,
    EMBEDDING_GRAD,
    MEAN_SQUARES,
    AVERAGE_STATISTIC,
    SCALE_SLOPE,
    STEP_SCALES,
    BLEND_MOMENT,
    STEP_TRITS,
    CAST_TRIT_VOTES,
    CAST_SCALE_VOTES,
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one result of one case compares with the reference."""

    label: str
    unequal: int
    """Elements that differ, or that are not finite in only one of the two."""
    max_error: float
    """Largest absolute difference."""
    relative_error: float
    """Norm of the error over norm of the reference."""
    cosine: float
    """Of the angle to the reference; 1 where both are zero."""
    passed: bool


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What the comparison of one kernel found, over all its cases."""

    kernel: str
    backend: str
    scale_type: str | None
    """None for a kernel without scales."""
    cases: int
    gate: str
    unequal: int
    max_error: float
    relative_error: float
    cosine: float
    seconds: float
    failures: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return not self.failures


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `arb verify-kernels` prints and writes to its ledger."""

    device: str
    versions: dict[str, str]
    kernels: tuple[KernelResult, ...]
    not_verified: tuple[str, ...]
    seconds: float
    passed: bool


def verify_kernels(
    names: Iterable[str],
    group_sizes: Mapping[str, int],
    device: torch.device,
    backends: Iterable[str],
    progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Compare kernels with their references on all their cases.

    Args:
        names: kernels to check; none at all means every one.
        group_sizes: scale types to check, by name.
        device: where to run.
        backends: `triton` or `interpreter`, and `torch`.
        progress: is told the name of each kernel before it is checked.

    Raises:
        ArbError: no kernel has one of the names, or a backend cannot run on `device`.
    """
    names, backends = list(names), list(backends)
    known = {spec.name: spec for spec in KERNELS}
    for name in names:
        if name not in known:
            listed = ", ".join(f"`{spec}`" for spec in known)
            raise ArbError(f"no kernel is named `{name}`", hint=f"choose from: {listed}")
    for backend in backends:
        check_backend(backend, device)
    chosen = [known[name] for name in names] or list(KERNELS)
    started, results = time.perf_counter(), []
    for spec in chosen:
        sizes = group_sizes if spec.uses_scales else {None: next(iter(group_sizes.values()))}
        for scale_type, group_size in sizes.items():
            progress(f"{spec.name} {scale_type or ''}".strip())
            cases = list(spec.cases(device, group_size))
            wanted = [_as_tuple(spec.reference(*copies(case.inputs))) for case in cases]
            results += [
                _verify(spec, cases, wanted, backend, scale_type, device) for backend in backends
            ]
    left_out = [f"{spec.name}: {item}" for spec in chosen for item in spec.not_verified]
    if device.type != "cuda":
        left_out.append(
            "all kernels: bfloat16, as Triton's interpreter computes it wrongly; needs a GPU"
        )
    return VerifyReport(
        device=_device_name(device),
        versions=_versions(),
        kernels=tuple(results),
        not_verified=tuple(left_out),
        seconds=time.perf_counter() - started,
        passed=all(result.passed for result in results),
    )


def _verify(
    spec: KernelSpec,
    cases: list[Case],
    wanted: list[tuple[Tensor, ...]],
    backend: str,
    scale_type: str | None,
    device: torch.device,
) -> KernelResult:
    run = spec.torch if backend == "torch" else spec.triton
    started, found = time.perf_counter(), []
    for case, reference in zip(cases, wanted, strict=True):
        with use_backend(backend):
            got = _as_tuple(run(*copies(case.inputs)))
        peers = (None,) * len(reference)
        if case.peer is not None:
            peers = _as_tuple(case.peer(*copies(case.inputs)))
        for result, expected, peer in zip(got, reference, peers, strict=True):
            found.append(compare(spec, case.label, result, expected, peer))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return KernelResult(
        kernel=spec.name,
        backend=backend,
        scale_type=scale_type,
        cases=len(cases),
        gate=spec.gate.text,
        unequal=sum(result.unequal for result in found),
        max_error=max(result.max_error for result in found),
        relative_error=max(result.relative_error for result in found),
        cosine=min(result.cosine for result in found),
        seconds=time.perf_counter() - started,
        failures=tuple(result for result in found if not result.passed),
    )


def compare(
    spec: KernelSpec, label: str, got: Tensor, expected: Tensor, peer: Tensor | None = None
) -> CaseResult:
    """Compare one result with the reference by the gate of its kernel."""
    if got.shape != expected.shape:
        return CaseResult(label, expected.numel(), math.inf, math.inf, 0.0, False)
    unequal = int((got != expected).sum())
    if spec.gate.exact and got.dtype == expected.dtype and unequal == 0:
        return CaseResult(label, 0, 0.0, 0.0, 1.0, True)
    a, b = got.double().flatten(), expected.double().flatten()
    error = a - b
    norm, size = float(error.norm()), float(b.norm())
    relative = norm / size if size else (0.0 if norm == 0 else math.inf)
    scale = float(a.norm()) * size
    cosine = float(a @ b) / scale if scale else float(norm == 0)
    if spec.gate.exact:
        passed = False
    elif peer is not None:
        passed = norm <= float((peer.double().flatten() - b).norm()) * (1 + spec.gate.peer_slack)
    else:
        passed = relative <= spec.gate.relative  # False for NaN
    largest = float(error.abs().max()) if error.numel() else 0.0
    values = (x if math.isfinite(x) else math.inf for x in (largest, relative))
    return CaseResult(label, unequal, *values, cosine if math.isfinite(cosine) else 0.0, passed)


def copies(inputs: tuple) -> list:
    """Clone the tensors of a case with their strides and offsets, so none is changed by a run."""
    return [
        torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage().clone(), value.storage_offset(), value.size(), value.stride()
        )
        if isinstance(value, Tensor)
        else value
        for value in inputs
    ]


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _versions() -> dict[str, str]:
    import platform

    from arbcli import __version__

    versions = {"arb": __version__, "python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        versions["triton"] = "not installed"
    return versions

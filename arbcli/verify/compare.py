"""Compare a result with its reference, and poison the memory that results are written to."""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arbcli.verify.verification import Verification


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one result of one case compares with the reference."""

    label: str
    elements: int
    unwritten: int
    """Elements that still hold the poison of uninitialised memory, and ought not to."""
    unequal: int
    """Elements that differ, or that are not finite in only one of the two."""
    max_error: float | None
    """Largest absolute difference; None if it is not finite."""
    relative_error: float | None
    """Norm of the error over norm of the reference; None if it is not finite."""
    cosine: float
    """Cosine of the angle to the reference; 1 if both are zero."""
    passed: bool
    error: str | None = None
    """Exception that was raised instead of a result."""

    @classmethod
    def failed(cls, label: str, error: Exception, references: tuple[Tensor, ...]) -> "CaseResult":
        """Record that there are no results, as the kernel raised an error."""
        size = sum(expected.numel() for expected in references)
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(label, size, size, size, None, None, 0.0, False, text)


def compare(
    spec: Verification,
    label: str,
    got: Tensor,
    expected: Tensor,
    peer: Tensor | None = None,
    terms: Tensor | None = None,
) -> CaseResult:
    """Compare one result with the reference by the gate of its kernel.

    Args:
        spec: verification of the kernel.
        label: label of the case.
        got: the result.
        expected: result of the reference, of the same shape; another shape fails.
        peer: result of the peer, of the same shape.
        terms: see `Verification.terms`.
    """
    size = expected.numel()
    if got.shape != expected.shape:
        text = f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        return CaseResult(label, size, size, size, None, None, 0.0, False, text)
    unequal = int((got != expected).sum())
    unwritten = int((_is_poison(got) & ~_is_poison(expected)).sum())
    if spec.gate.exact and got.dtype == expected.dtype and unequal == 0:
        return CaseResult(label, size, unwritten, 0, 0.0, 0.0, 1.0, True)
    if spec.gate.rounded and got.dtype == torch.bfloat16:
        peer = expected.to(got.dtype)
    figures = errors(got, expected)
    passed = not spec.gate.exact and figures[1] is not None and figures[1] <= spec.gate.relative
    if not (passed or spec.gate.exact):
        b = expected.double()
        error, scale = float((got.double() - b).norm()), float(b.norm())
        if terms is not None:
            scale = max(scale, float(terms.norm()))
        limit = spec.gate.relative * scale
        if peer is not None:
            allowed = float((peer.double() - b).norm()) * (1 + spec.gate.peer_slack)
            limit = max(limit, min(allowed, spec.gate.peer_relative * scale))
        passed = math.isfinite(error) and error <= limit
    return CaseResult(label, size, unwritten, unequal, *figures, passed)


def errors(got: Tensor, expected: Tensor) -> tuple[float | None, float | None, float]:
    """Measure (largest error, norm of the error over norm of the reference, cosine)."""
    a, b = (values.detach().double().flatten() for values in (got, expected))
    error = a - b
    norm, size = float(error.norm()), float(b.norm())
    relative = norm / size if size else (0.0 if norm == 0 else math.inf)
    scale = float(a.norm()) * size
    cosine = float(a @ b) / scale if scale else float(norm == 0)
    largest = float(error.abs().max()) if error.numel() else 0.0
    return (
        largest if math.isfinite(largest) else None,
        relative if math.isfinite(relative) else None,
        cosine if math.isfinite(cosine) else 0.0,
    )


def worst(values: Iterable[float | None]) -> float | None:
    """Return the largest error; None, for a value that is not finite, exceeds any number."""
    largest = 0.0
    for value in values:
        if value is None:
            return None
        largest = max(largest, value)
    return largest


def as_tuple(result: Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
    """Return results as a tuple, a single one too."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


@contextmanager
def poisoned(*, warn_only: bool = True) -> Iterator[None]:
    """Make `torch.empty` return NaN, or the largest integer, instead of leftovers.

    Needs torch's deterministic mode, in which `warn_only` lets other operations pass, silently.
    """
    previous = torch.get_deterministic_debug_mode()
    filling: Any = torch.utils.deterministic
    fill = filling.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn" if warn_only else "error")
    filling.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            # in lanes that a mask leaves out
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
            yield
    finally:
        torch.set_deterministic_debug_mode(previous)
        filling.fill_uninitialized_memory = fill


def _is_poison(values: Tensor) -> Tensor:
    if values.dtype.is_floating_point:
        return values.isnan()
    return values == torch.iinfo(values.dtype).max

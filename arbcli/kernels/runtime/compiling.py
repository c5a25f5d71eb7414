"""Count the kernels that Triton compiles or loads, and measure the time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from arbcli.kernels.runtime._triton import HAS_TRITON, triton

MICROSECOND = 1e-6


@dataclass(slots=True)
class Compiling:
    """Number and time of kernels that a process compiled or loaded."""

    compiled: int = 0
    loaded: int = 0
    """Number of kernels loaded from Triton's cache."""
    seconds: float = 0.0
    """Time of compiling and loading, in seconds."""


@contextmanager
def counted_compiling() -> Iterator[Compiling]:
    """Count the kernels that Triton compiles and loads inside the context, in this process."""
    counts = Compiling()
    if not HAS_TRITON:
        yield counts
        return
    knobs = triton.knobs.compilation
    previous = knobs.listener

    def listen(*, times: Any, cache_hit: bool, **others: Any) -> None:
        counts.loaded += cache_hit
        counts.compiled += not cache_hit
        counts.seconds += times.total * MICROSECOND
        if previous is not None:
            previous(times=times, cache_hit=cache_hit, **others)

    knobs.listener = listen
    try:
        yield counts
    finally:
        knobs.listener = previous

"""Kernels that begin while the one before them still runs: programmatic dependent launch.

Starting a small kernel and fetching its first bytes takes longer than its computation. A kernel
that is launched to overlap starts as soon as every program of the kernel before it has passed
`wait_for_last`. It first loads what that kernel does not write, such as weights, then waits for
that kernel's results. So when a kernel starts, only the one before it can still be running.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.backend import capability

_overlapping = False


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one, then let the next one start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@contextmanager
def overlapping() -> Iterator[None]:
    """Let kernels launched inside begin early, if they can; meanwhile no weight must change."""
    global _overlapping
    before, _overlapping = _overlapping, True
    try:
        yield
    finally:
        _overlapping = before


def overlap_options(tensor: Tensor) -> dict[str, bool]:
    """Choose how a kernel that calls `wait_for_last` is launched on the GPU of `tensor`."""
    if _overlapping and not INTERPRETED and capability(tensor) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}

"""Kernels that begin while the one before them still runs: programmatic dependent launch.

Starting a small kernel and fetching its first bytes takes longer than its computation. A kernel
that is launched to overlap starts as soon as every program of the kernel before it has let it, in
`wait_for_last`. It first loads what no kernel that may still be running writes, such as weights,
then waits until all before it are over. It writes nothing earlier.

Most kernels let the next one start when they have waited: then only the one before it can still be
running. A kernel that lets it start *early*, before it waits itself, may still be running together
with all before it, back to the last kernel that was not early. In a step of a text:

- Only `row_matmul` is early, and of its kind only those whose next kernel loads nothing ahead that
  the step computes. `fused` says which: in an `HNet`, `route_position` and `take_chunk` load ahead
  what was computed before the product that they wait for, so that product is not early.
- Products load weights ahead. Attention, and a Mamba block, load the position, rows of tables, and
  what earlier steps left in the rings and the state of their own block. A step ends with choosing a
  byte and begins with its embedding, which are not early; positions are counted by torch, between
  them, whose kernels begin and end alone, or by `route_position` and `take_chunk`, which are not
  early either. So all that earlier steps wrote is there.
- Tickets and results are read, and written, behind the wait.

A kernel that is neither launched to overlap nor lets the next one start begins when all before it
are over, and the next begins when it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.backend import capability

_overlapping = False


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr, EARLY: tl.constexpr = False):
    """Wait for the kernel before this one, then let the next one start; if `EARLY`, before that."""
    if OVERLAP:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
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

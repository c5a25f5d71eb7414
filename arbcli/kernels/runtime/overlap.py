"""Kernels that begin while the one before them still runs: programmatic dependent launch.

Starting a small kernel and fetching its first bytes takes longer than its computation. A kernel
that is launched to overlap starts as soon as every program of the kernel before it allows it. It
first loads data that no running kernel writes, such as weights. Then it waits until the kernel
before it has ended; all earlier ones have ended too, as each of them has waited. Nothing is written
before a wait.

There are two orders. Most kernels wait and then allow the next one to start: only one kernel before
it can still be running then. *Early* kernels allow it first: the kernel before it may still be
waiting then, and so may any number of early ones before that. Data may therefore be read before a
wait if, since it was written, there has been a kernel that is not early, or one that does not
overlap, such as torch's own. A step of a text reads before waits:

- Weights, and tables of angles, are written by no kernel of a step.
- Attention and Mamba blocks read the position, and the rings and the state of their own block
  except for the new slot; `row_matmul` of parts of attention reads the position. All of these were
  written in an earlier step, or by torch during prefill. The kernels that choose a byte and look it
  up have run since then, and are not early.
- In a model with chunks, positions of decoders and of the inner network are counted by kernels of
  a step. Before a decoder follows the end of a phase, which no kernel overlaps, or the kernel that
  takes a chunk, which is not early; after the inner network, the same two kernels as above.
- `route_position` and `take_chunk` read results from before the product that they wait for,
  so that product must not be early: the argument `early` of `TernaryLinear.fused`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.backend import capability

_overlapping = False


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr, EARLY: tl.constexpr = False):
    """Wait for the kernel before this one, then allow the next to start; if `EARLY`, before."""
    if OVERLAP:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()


@contextmanager
def overlapping() -> Iterator[None]:
    """Launch kernels in the block to overlap, if they can; no weight may change in the block."""
    global _overlapping
    previous, _overlapping = _overlapping, True
    try:
        yield
    finally:
        _overlapping = previous


def overlap_options(tensor: Tensor) -> dict[str, bool]:
    """Return the launch options of a kernel with `wait_for_last` on the GPU of `tensor`."""
    if _overlapping and not INTERPRETED and capability(tensor) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}

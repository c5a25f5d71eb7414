"""Replacement of all kernel launches, for tracing.

Every kernel is launched as `kernel[grid](...)`, compiled or interpreted. Replacing this operator
affects all kernels, also new ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from arbcli.kernels.runtime._triton import HAS_TRITON


@contextmanager
def replaced_launches(instead: Callable) -> Iterator[None]:
    """Call `instead(kernel, grid, *arguments, **options)` in place of every launch."""
    if not HAS_TRITON:  # no kernel can be launched
        yield
        return
    from triton.runtime.jit import KernelInterface

    before = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: partial(instead, kernel, grid)
    try:
        yield
    finally:
        KernelInterface.__getitem__ = before

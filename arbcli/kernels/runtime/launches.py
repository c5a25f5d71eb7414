"""Single entry point of kernel launches, which can be replaced to trace them.

Every kernel here is launched as `kernel[grid](...)`, triton's own notation, whether it is compiled
or interpreted. Replacing what that does reaches all of them, and a new one needs no word for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from arbcli.kernels.runtime._triton import HAS_TRITON


@contextmanager
def replaced_launches(instead: Callable) -> Iterator[None]:
    """Call `instead(kernel, grid, *arguments, **options)` wherever a kernel would be launched."""
    if not HAS_TRITON:  # nothing can be launched
        yield
        return
    from triton.runtime.jit import KernelInterface

    before = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: partial(instead, kernel, grid)
    try:
        yield
    finally:
        KernelInterface.__getitem__ = before

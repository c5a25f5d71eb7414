"""Conditional nodes of CUDA graphs: a kernel sets whether a part of its graph runs."""

import ctypes
from functools import cache
from typing import Any

import torch

from arbcli.kernels.runtime._triton import HAS_TRITON, INTERPRETED, tl, triton

OLDEST_DRIVER = 12040
"""First CUDA version with conditional nodes."""

if HAS_TRITON:

    @tl.core.extern
    def _set_condition(handle: Any, value: Any, _semantic: Any = None) -> Any:
        """Call the device function that sets a condition."""
        types = {(tl.int64, tl.int32): ("cudaGraphSetConditional", tl.int32)}
        return tl.core.extern_elementwise(
            "", "", [handle, value], types, is_pure=False, _semantic=_semantic
        )


@triton.jit
def tell_condition(handle_ptr, value):
    """Set the condition of a later conditional node of the same graph.

    A handle of 0 does nothing.
    """
    handle = tl.load(handle_ptr)
    if handle != 0:
        _set_condition(handle, value.to(tl.int32))


@cache
def driver() -> ctypes.CDLL:
    """Load the library of the CUDA driver."""
    return ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")


def has_conditions(device: torch.device) -> bool:
    """Return whether a device supports conditional nodes."""
    if device.type != "cuda" or torch.version.cuda is None or not HAS_TRITON or INTERPRETED:
        return False
    version = ctypes.c_int()
    failed = driver().cuDriverGetVersion(ctypes.byref(version))
    return not failed and version.value >= OLDEST_DRIVER

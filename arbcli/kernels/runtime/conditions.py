"""Conditions of CUDA graphs: a kernel says on the device whether a part of its graph is to run."""

from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

if hasattr(tl, "core"):

    @tl.core.extern
    def _set_condition(handle, value, _semantic=None):
        """Call the function of the driver; what it returns here is nothing."""
        types = {(tl.int64, tl.int32): ("cudaGraphSetConditional", tl.int32)}
        return tl.core.extern_elementwise(
            "", "", [handle, value], types, is_pure=False, _semantic=_semantic
        )


@triton.jit
def _tell_condition_kernel(handle_ptr, value_ptr, OVERLAP: tl.constexpr):
    handle = tl.load(handle_ptr)
    wait_for_last(OVERLAP)
    value = tl.load(value_ptr).to(tl.int32)
    if handle != 0:
        _set_condition(handle, value)


def tell_condition(handle: Tensor, value: Tensor) -> None:
    """Say whether what a conditional node has is to run, in a kernel of the same CUDA graph.

    Args:
        handle: int64 of one element on a GPU, the node's; 0 is none, and nothing happens.
        value: bool of one element on the same GPU.
    """
    _tell_condition_kernel[(1,)](handle, value, num_warps=1, **overlap_options(value))

"""Conditions of CUDA graphs: a kernel says on the device whether a part of its graph is to run."""

from arbcli.kernels.runtime._triton import HAS_TRITON, tl, triton

if HAS_TRITON:

    @tl.core.extern
    def _set_condition(handle, value, _semantic=None):
        """Call a function that the driver has for kernels; it gives nothing back."""
        types = {(tl.int64, tl.int32): ("cudaGraphSetConditional", tl.int32)}
        return tl.core.extern_elementwise(
            "", "", [handle, value], types, is_pure=False, _semantic=_semantic
        )


@triton.jit
def tell_condition(handle_ptr, value):
    """Say whether what a conditional node has is to run, in a kernel before it in its graph.

    A handle of 0 is of no node, and nothing happens.
    """
    handle = tl.load(handle_ptr)
    if handle != 0:
        _set_condition(handle, value.to(tl.int32))

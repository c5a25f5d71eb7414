"""Descriptions of tensors, by which the copy engine of a GPU loads and stores whole tiles."""

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import TensorDescriptor


def described(tensor: Tensor, tile: list[int]) -> "TensorDescriptor":
    """Describe a tensor to a kernel that loads tiles of it.

    A launch makes of this what the driver needs, for which the thread must have a current context
    of CUDA. A thread has none before its first call of the runtime, and a thread of autograd may
    begin with this kernel. To ask whether a stream is being captured is such a call, and no more.

    Args:
        tensor: strides but the last one, which is 1, are multiples of 16 bytes, and so is its
            address.
        tile: the shape of what is loaded at a time.
    """
    if torch.cuda.is_initialized():
        torch.cuda.is_current_stream_capturing()
    return TensorDescriptor.from_tensor(tensor, tile)

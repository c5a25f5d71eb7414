"""TMA descriptors, with which the GPU's copy engine loads and stores whole tiles."""

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import TensorDescriptor


def described(tensor: Tensor, tile: list[int]) -> "TensorDescriptor":
    """Create a tensor descriptor for a kernel that loads tiles.

    The launch encodes it with the driver, which requires a current CUDA context. A thread has no
        context before its first runtime call, and this may be the first kernel of an autograd
        thread. So this queries whether a stream is being captured, a runtime call without side
        effects.

    Args:
        tensor: strides but the last one, which is 1, are multiples of 16 bytes, and so is its
            address.
        tile: shape of a tile.
    """
    if torch.cuda.is_initialized():
        torch.cuda.is_current_stream_capturing()
    return TensorDescriptor.from_tensor(tensor, tile)

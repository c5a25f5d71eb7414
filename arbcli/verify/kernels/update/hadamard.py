"""References and random inputs for `arbcli.kernels.update.hadamard`."""

import torch
from torch import Tensor

from arbcli.verify.kernels.update.random_bits import mix_reference


def signs_reference(columns: int) -> list[int]:
    """List s of every column, one Python integer at a time."""
    words = [mix_reference(k * 0x9E3779B9 & 0xFFFFFFFF) for k in range(columns)]
    return [1 - 2 * (word >> 31) for word in words]


def hadamard_matrix(block: int) -> list[list[int]]:
    """Build H, (block, block)."""
    return [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]


def mixed_reference(x: Tensor, block: int) -> Tensor:
    """Compute (x * s) H of (N, K) float32, rounding each sum of two as all backends do."""
    signs = torch.tensor(signs_reference(x.shape[1]), dtype=x.dtype, device=x.device)
    y = (x * signs).reshape(-1, block)
    columns, bit = torch.arange(block, device=x.device), block // 2
    while bit:
        upper = (columns & bit) != 0
        other = y[:, columns ^ bit]
        y = torch.where(upper, other - y, y + other)
        bit //= 2
    return y.reshape(x.shape)

"""Mix the columns of a gradient before it is rounded: y = (x * s) H in each block of B columns.

    H[i, j] = (-1)**(how many bits i and j have in common),  s[k] = +-1, by random bits

H is symmetric and H H = B, so x = (y H) * s / B. Where a few columns have most of a row, every
element of the result has a share of them: the largest is four root-mean-squares instead of twenty,
and rounding by the largest loses less of the rest.

A product by H is log2(B) stages of sums and differences of pairs. Their order is fixed, the highest
bit of the column first, so floats are the same on every backend. Of integers the result is exact.

Source: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
https://arxiv.org/abs/2404.00456
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.update.random_bits import mix_word, random_bits

MAX_BLOCK = 64
"""Blocks of 128 lose about as much."""


def block_of(columns: int) -> int:
    """Return B of a matrix: the largest power of two that divides its number of columns."""
    return min(MAX_BLOCK, columns & -columns) if columns else 1


BLOCK_FITS = f"0 < block <= {MAX_BLOCK} and block & (block - 1) == 0 and K % block == 0"
"""Whether K columns can be mixed in blocks."""


def _signs(x: Tensor) -> Tensor:
    """Compute s of the columns of a matrix, (K,) int32."""
    columns = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    words = random_bits(columns.new_zeros(()), columns.new_zeros(1), columns)
    return words[0].bitwise_right_shift_(31).mul_(2).add_(1)


def mixed(x: Tensor, block: int) -> Tensor:
    """Compute (x * s) H.

    Args:
        x: (N, K) float32.
        block: B, a power of two that divides K; 1 leaves x as it is.

    Returns:
        A new tensor like `x`.
    """
    return x if block == 1 else _stages(x * _signs(x), block)


def mixed_back(y: Tensor, block: int) -> Tensor:
    """Compute (y H) * s, B times the input of `mixed`.

    Args:
        y: (N, K) int32 sums, of magnitude up to (2**31 - 1) / B.
        block: as of `mixed`.

    Returns:
        (N, K) int32; y itself if `block` is 1.
    """
    return y if block == 1 else _stages(y, block) * _signs(y)


def _stages(x: Tensor, block: int) -> Tensor:
    # a copy, with the columns of blocks one below the other
    y = x.reshape(-1, block).T.clone(memory_format=torch.contiguous_format)
    to = torch.empty_like(y)
    for _ in range(block.bit_length() - 1):
        # the highest bit of a column becomes its lowest: after all stages each is where it was
        low, high = y.chunk(2)
        torch.add(low, high, out=to[::2])
        torch.sub(low, high, out=to[1::2])
        y, to = to, y
    return y.T.reshape(x.shape)


@triton.jit
def column_signs(k):
    """Compute s of columns inside a kernel, int32."""
    return 1 - 2 * (mix_word(k.to(tl.uint32) * 0x9E3779B9) >> 31).to(tl.int32)


@triton.jit
def mix_blocks(x, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Multiply each block of columns of a tile by H, inside a kernel."""
    blocks: tl.constexpr = x.shape[0] * x.shape[1] // BLOCK
    y = tl.reshape(x, (blocks, BLOCK))
    for _ in tl.static_range(STAGES):
        low, high = tl.split(tl.permute(tl.reshape(y, (blocks, 2, BLOCK // 2)), (0, 2, 1)))
        y = tl.reshape(tl.join(low + high, low - high), (blocks, BLOCK))
    return tl.reshape(y, x.shape)

"""Sum the squares of an int8 moment, or of the high halves of its bytes."""

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import count_tiles, row_chunks, tile_of_program
from arbcli.kernels.runtime.operation import Operation, tl, triton

BLOCK_N, BLOCK_K = 8, 512


def _moment_squares_torch(moment: Tensor, squares: Tensor, nibble: bool) -> None:
    for rows in row_chunks(moment):
        state = moment[rows].to(torch.int32)
        if nibble:
            state.bitwise_right_shift_(4)
        squares += state.mul_(state).sum()


@triton.jit
def _moment_squares_kernel(
    moment_ptr, squares_ptr, N, K, stride_n, stride_k,
    NIBBLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n, k, mask = tile_of_program(N, K, BLOCK_N, BLOCK_K)
    state = tl.load(moment_ptr + n * stride_n + k * stride_k, mask=mask, other=0).to(tl.int32)
    if NIBBLE:
        state >>= 4
    tl.atomic_add(squares_ptr, tl.sum(state * state).to(tl.int64))


def _moment_squares_triton(moment: Tensor, squares: Tensor, nibble: bool) -> None:
    rows, columns = moment.shape
    if moment.numel():
        grid = (count_tiles(rows, columns, BLOCK_N, BLOCK_K),)
        _moment_squares_kernel[grid](
            moment, squares, rows, columns, *moment.stride(),
            NIBBLE=nibble, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        )  # fmt: skip


moment_squares = Operation(
    "moment_squares", _moment_squares_triton, _moment_squares_torch,
    "moment: int8[N, K]; squares: int64[]; nibble",
)  # fmt: skip
"""Add the sum of the squares of a moment to `squares`, in place.

Args:
    moment: (N, K) int8; with `nibble`, bytes of 16 m + (remainder mod 16).
    squares: int64 scalar tensor.
    nibble: whether m is the high half of a byte.
"""

"""Normalise the rows of a direction to equal norm, and the matrix to unit root-mean-square.

A row of zeros stays one: gain[n] = 2**16 sqrt(N / R) / rms(values[n]), R the rows that are not
zero. Source, with a running mean instead of that of the one step: Z. Li et al., "NorMuon",
https://arxiv.org/abs/2510.05491.
"""

import math

import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.direction import UNIT, native_arguments


def _unit_rows_torch(values: Tensor, ok: Tensor) -> Tensor:
    squares = torch.empty(len(values), dtype=torch.float32, device=values.device)
    for rows in row_chunks(values):
        torch.sum(values[rows].to(torch.float32, copy=True).square_(), dim=1, out=squares[rows])
    return _gains_of(squares, values.shape[1], ok)


def _unit_rows_native(values: Tensor, ok: Tensor) -> Tensor:
    gain = torch.empty(len(values), dtype=torch.float32, device=values.device)
    direction, threads = (values, None, None), native.threads_for(values.numel())
    ok *= native.call("unit_rows", *native_arguments(*direction), gain, len(values), threads)
    return gain


def _gains_of(squares: Tensor, width: int, ok: Tensor) -> Tensor:
    """Compute the gains from the sums of squares of rows."""
    gain = (squares / width).rsqrt_().mul_(UNIT)
    usable = (squares > 0) & (squares < float("inf"))
    ok *= torch.isfinite(squares).all()
    gain *= math.sqrt(len(gain) / max(1, int(usable.sum())))
    return torch.where(usable, gain, 0)


@triton.jit
def _row_squares_kernel(
    values_ptr, squares_ptr,
    N, K,
    stride_vn, stride_vk,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    squares = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        values_ptrs = values_ptr + n[:, None] * stride_vn + k.to(tl.int64) * stride_vk
        u = tl.load(values_ptrs, mask=(n < N)[:, None] & (k < K), other=0).to(tl.float32)
        squares += u * u
    tl.store(squares_ptr + n, tl.sum(squares, axis=1) / K, mask=n < N)


@triton.jit
def _unit_rows_kernel(squares_ptr, ok_ptr, gain_ptr, N, UNIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the gains of a block of rows; every program counts the nonzero rows of the matrix.

    The sum of squares of a row classifies it: above 0 it counts, 0 is ignored, and one that is not
    finite is bad.
    """
    rows = tl.zeros((BLOCK_N,), dtype=tl.int32)
    bad = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        square = tl.load(squares_ptr + n, mask=n < N, other=0)
        rows += ((square > 0) & (square < float("inf"))).to(tl.int32)
        bad += 1 - (square < float("inf")).to(tl.int32)
    if tl.program_id(0) == 0 and tl.sum(bad) > 0:
        tl.store(ok_ptr, 0)
    share = tl.maximum(tl.sum(rows), 1).to(tl.float32) / N
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    square = tl.load(squares_ptr + n, mask=n < N, other=0)
    usable = (square > 0) & (square < float("inf"))
    gain = tl.where(usable, UNIT * tl.rsqrt(square * share), 0)
    tl.store(gain_ptr + n, gain, mask=n < N)


def _unit_rows_triton(values: Tensor, ok: Tensor) -> Tensor:
    squares, gain = torch.empty(2, len(values), dtype=torch.float32, device=values.device)
    row_major = values.stride(1) == 1  # else neighbours in memory are of one column
    block_n, block_k = (4, 512) if row_major else (32, 32)
    _row_squares_kernel[(triton.cdiv(len(values), block_n),)](
        values, squares, *values.shape, *values.stride(), BLOCK_N=block_n, BLOCK_K=block_k
    )
    _unit_rows_kernel[(triton.cdiv(len(values), 1024),)](
        squares, ok, gain, len(values), UNIT=UNIT, BLOCK_N=1024
    )
    return gain


unit_rows = Operation(
    "unit_rows", _unit_rows_triton, _unit_rows_torch,
    "values: real[N, K]; ok: int32[]",
    native=_unit_rows_native,
)  # fmt: skip
"""Compute row gains that give all rows equal norm, and the matrix unit root-mean-square.

Args:
    values: (N, K) float32 or bfloat16, not empty, any strides.
    ok: int32 scalar tensor; becomes 0 if a row is not finite.

Returns:
    (N,) float32, 2**16 over the root-mean-square of the row times that of the share of rows
    that are not zero; 0 for those that are, or are not finite.
"""

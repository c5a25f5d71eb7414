"""Normalise a direction to unit root-mean-square: 2**16 / rms(values * row_gain * column_gain).

The gain is multiplied into the row gains, so the direction itself is never stored.
"""

import math

import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import count_tiles, row_chunks, tiles_of_a_program
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.direction import (
    GAINS_BELONG,
    UNIT,
    load_gain,
    native_arguments,
)
from arbcli.kernels.update.gradient_gains import sum_parts


def row_squares_native(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None
) -> Tensor:
    """Sum (values * row_gain * column_gain)**2 over each row: (N,) float32."""
    squares = torch.empty(len(values), dtype=torch.float32, device=values.device)
    direction, threads = (values, row_gain, column_gain), native.threads_for(values.numel())
    native.call("row_squares", *native_arguments(*direction), squares, len(values), threads)
    return squares


def _unit_gain_native(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None, ok: Tensor
) -> Tensor:
    return _gain_of(row_squares_native(values, row_gain, column_gain), values, row_gain, ok)


def _unit_gain_torch(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None, ok: Tensor
) -> Tensor:
    squares = torch.empty(len(values), dtype=torch.float32, device=values.device)
    for rows in row_chunks(values):
        u = values[rows].to(torch.float32, copy=True)
        if column_gain is not None:
            u *= column_gain
        if row_gain is not None:
            u *= row_gain[rows, None]
        torch.sum(u.square_(), dim=1, out=squares[rows])
    return _gain_of(squares, values, row_gain, ok)


def _gain_of(squares: Tensor, values: Tensor, row_gain: Tensor | None, ok: Tensor) -> Tensor:
    """Compute the gain from the sums of squares of rows."""
    mean_square = float(squares.cpu().sum(dtype=torch.float64)) / values.numel()
    usable = 0 < mean_square < math.inf
    ok *= usable
    gain = UNIT / math.sqrt(mean_square) if usable else 0.0
    if row_gain is None:
        return squares.new_full((1,), gain).expand(len(values))
    return row_gain * gain


@triton.jit
def _direction_squares_kernel(
    values_ptr, row_gain_ptr, column_gain_ptr, squares_ptr,
    N, K,
    stride_vn, stride_vk,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sum the squares of `STEPS` consecutive tiles."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    tile_n, tile_k = tl.program_id(0).to(tl.int64) // tiles_k, tl.program_id(0) % tiles_k
    k = (tile_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask_k = k < K
    column_gain = load_gain(column_gain_ptr, k, mask_k, HAS_COLUMNS)
    squares = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for step in range(STEPS):
        n = ((tile_n * STEPS + step) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        mask_n = n < N
        values_ptrs = values_ptr + n * stride_vn + k * stride_vk
        u = tl.load(values_ptrs, mask=mask_n & mask_k, other=0).to(tl.float32)
        u = u * load_gain(row_gain_ptr, n, mask_n, HAS_ROWS) * column_gain
        squares += u * u
    tl.store(squares_ptr + tl.program_id(0), tl.sum(squares))


@triton.jit
def _unit_gain_kernel(
    squares_ptr, row_gain_ptr, ok_ptr, gain_ptr,
    parts, num_weights, L,
    HAS_ROWS: tl.constexpr, UNIT: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    mean_square = sum_parts(squares_ptr, parts, tl.float32) / num_weights
    usable = (mean_square > 0) & (mean_square < float("inf"))
    gain = tl.where(usable, UNIT * tl.rsqrt(mean_square), 0)
    if tl.program_id(0) == 0 and not usable:
        tl.store(ok_ptr, 0)
    offs_l = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    mask = offs_l < L
    gains = tl.zeros((BLOCK_L,), dtype=tl.float32) + gain
    if HAS_ROWS:
        gains *= tl.load(row_gain_ptr + offs_l, mask=mask, other=0)
    tl.store(gain_ptr + offs_l, gains, mask=mask)


def _unit_gain_triton(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None, ok: Tensor
) -> Tensor:
    rows, columns = values.shape
    has_rows, has_columns = row_gain is not None, column_gain is not None
    block_n, block_k = 4, 256
    steps = tiles_of_a_program(values, 1, 8)
    parts = count_tiles(rows, columns, block_n * steps, block_k)
    squares, gain = (
        torch.empty(size, dtype=torch.float32, device=values.device)
        for size in (parts, rows if has_rows else 1)
    )
    _direction_squares_kernel[(parts,)](
        values, row_gain if has_rows else squares, column_gain if has_columns else squares, squares,
        rows, columns, *values.stride(),
        HAS_ROWS=has_rows, HAS_COLUMNS=has_columns, BLOCK_N=block_n, BLOCK_K=block_k, STEPS=steps,
    )  # fmt: skip
    _unit_gain_kernel[(triton.cdiv(len(gain), 1024),)](
        squares, row_gain if has_rows else squares, ok, gain,
        parts, float(values.numel()), len(gain),
        HAS_ROWS=has_rows, UNIT=UNIT, BLOCK_L=1024,
    )  # fmt: skip
    return gain.expand(rows)


unit_gain = Operation(
    "unit_gain", _unit_gain_triton, _unit_gain_torch,
    "values: real[N, K]; row_gain: float32[N]? dense; column_gain: float32[K]? dense; ok: int32[]",
    native=_unit_gain_native, where=(GAINS_BELONG,),
)  # fmt: skip
"""Compute the row gains that give a direction unit root-mean-square over the matrix.

Args:
    values: (N, K) float32 or bfloat16, not empty, any strides.
    row_gain: (N,) float32, contiguous; None for ones.
    column_gain: (K,) float32; None for ones.
    ok: int32 scalar tensor; becomes 0 if the direction is all zero, or not finite.

Returns:
    (N,) float32, `row_gain` times 2**16 over the root-mean-square of
    values * row_gain * column_gain; 0 if that is none. All the same, with a stride of 0, if
    there is no `row_gain`.
"""

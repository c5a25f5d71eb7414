"""Copy rows of an int8 or uint8 table to a compact matrix, and write them back in place.

A step that touches few rows of a large table works on a compact matrix of these rows. The kernels
copy bytes. Out-of-range row indices read zeros and are not written, so lists of rows can be padded.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.runtime.operation import Operation, tl, triton


class TouchedRows(NamedTuple):
    """The distinct rows of a table that slots refer to, and the slots of each row."""

    rows: Tensor
    """(R,) int64: distinct row ids, ascending, padded with V."""
    order: Tensor
    """(S,) int64: slots in a stable sort by id; slots without a row are last."""
    bounds: Tensor
    """(R + 1,) int64: the slots of rows[r] are order[bounds[r] : bounds[r + 1]]."""
    count: Tensor  # type: ignore[assignment]  # in place of the method of tuples
    """int64 scalar: number of touched rows; the others of the R rows are padding."""


def _gather_rows_torch(buffer: Tensor, rows: Tensor) -> Tensor:
    num_rows = len(buffer)
    if num_rows == 0:
        return buffer.new_zeros(len(rows), buffer.shape[1])
    outside = (rows < 0) | (rows >= num_rows)
    return buffer.index_select(0, rows.clamp(0, num_rows - 1)).masked_fill_(outside[:, None], 0)


def _scatter_rows_torch(buffer: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    inside = (rows >= 0) & (rows < len(buffer))
    return buffer.index_copy_(0, rows[inside], values[inside])


@triton.jit
def _gather_rows_kernel(
    buffer_ptr, rows_ptr, values_ptr,
    R, V, B,
    stride_r, stride_bv, stride_bb,
    BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    offs_r = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    offs_b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    mask_r = offs_r < R
    v = tl.load(rows_ptr + offs_r * stride_r, mask=mask_r, other=-1)  # [BLOCK_R, 1] int64
    inside = (v >= 0) & (v < V)
    buffer_ptrs = buffer_ptr + v * stride_bv + offs_b.to(tl.int64) * stride_bb
    byte = tl.load(buffer_ptrs, mask=inside & (offs_b < B), other=0)  # [BLOCK_R, BLOCK_B]
    tl.store(values_ptr + offs_r * B + offs_b, byte, mask=mask_r & (offs_b < B))


@triton.jit
def _scatter_rows_kernel(
    buffer_ptr, rows_ptr, values_ptr,
    R, V, B,
    stride_r, stride_bv, stride_bb, stride_vr, stride_vb,
    BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    offs_r = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    offs_b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    v = tl.load(rows_ptr + offs_r * stride_r, mask=offs_r < R, other=-1)  # [BLOCK_R, 1] int64
    mask = (v >= 0) & (v < V) & (offs_b < B)
    columns = offs_b.to(tl.int64)
    byte = tl.load(values_ptr + offs_r * stride_vr + columns * stride_vb, mask=mask, other=0)
    tl.store(buffer_ptr + v * stride_bv + columns * stride_bb, byte, mask=mask)


def _tiles(num_rows: int, num_bytes: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose the programs and tiles that cover (num_rows, num_bytes)."""
    block_b = min(256, triton.next_power_of_2(num_bytes))
    block_r = min(128, 2048 // block_b)
    grid = (triton.cdiv(num_rows, block_r), triton.cdiv(num_bytes, block_b))
    return grid, {"BLOCK_R": block_r, "BLOCK_B": block_b}


def _gather_rows_triton(buffer: Tensor, rows: Tensor) -> Tensor:
    (num_rows, num_bytes), count = buffer.shape, len(rows)
    values = torch.empty(count, num_bytes, dtype=buffer.dtype, device=buffer.device)
    if values.numel():
        grid, blocks = _tiles(count, num_bytes)
        _gather_rows_kernel[grid](
            buffer, rows, values, count, num_rows, num_bytes, rows.stride(0), *buffer.stride(),
            **blocks,
        )  # fmt: skip
    return values


def _scatter_rows_triton(buffer: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    (num_rows, num_bytes), count = buffer.shape, len(rows)
    if values.numel():
        grid, blocks = _tiles(count, num_bytes)
        _scatter_rows_kernel[grid](
            buffer, rows, values, count, num_rows, num_bytes, rows.stride(0), *buffer.stride(),
            *values.stride(), **blocks,
        )  # fmt: skip
    return buffer


gather_rows = Operation(
    "gather_rows", _gather_rows_triton, _gather_rows_torch,
    "buffer: int8|uint8[V, B]; rows: int64[R]",
)  # fmt: skip
"""Copy rows of a table.

Args:
    buffer: (V, B) int8 or uint8, any strides.
    rows: (R,) int64; may repeat.

Returns:
    (R, B) of the buffer's dtype, contiguous; zeros where rows[r] is outside 0..V-1.
"""

scatter_rows_ = Operation(
    "scatter_rows", _scatter_rows_triton, _scatter_rows_torch,
    "buffer: int8|uint8[V, B]; rows: int64[R]; values: int8|uint8[R, B]",
    where=("values.dtype == buffer.dtype",),
)  # fmt: skip
"""Write rows of a table in place.

Args:
    buffer: (V, B) int8 or uint8, any strides.
    rows: (R,) int64; indices in 0..V-1 are distinct, others are ignored.
    values: (R, B) of the buffer's dtype, any strides.

Returns:
    `buffer`.
"""

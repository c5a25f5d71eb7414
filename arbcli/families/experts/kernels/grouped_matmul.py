"""Grouped matrix products of a mixture of experts: rows of x are sorted by expert.

The bounds of the experts' rows are known only on the device. The launch depends on shapes alone,
and every program looks up its work on the device, so the host never waits. The rows of each expert
are cut into separate blocks, so that a tile needs a single matrix. The last block of an expert also
reads rows of the next one, but does not store their products.

    bounds 2, 7, 9, 9; blocks of 4 rows; rows 0, 1 and 9 to 11 have no expert

    row      0  1| 2  3  4  5  6| 7  8|     | 9 10 11
    group    0   | 1            | 2   | 3   | 4
    block    0   | 1          2 | 3   | none| 4            groups 0 and 4 have none with `out`
    reads        |            6 7 8 9                      block 2 stores row 6 alone

Blocks are numbered over all groups, so that programs take tiles of (block, columns) in turns. The
number of blocks is known only on the device: a program computes the cumulative sum of blocks over
groups, at most 258 numbers in registers, and searches the group of its block. The grid is an upper
bound.

Tiles are ordered in bands of 8 blocks of rows that traverse the columns of w together, so that a
tile of w is read from memory once per band, and from the L2 cache by the other blocks.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import described, tl, triton
from arbcli.kernels.runtime.backend import capability, num_processors
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.update.newton_schulz import HOPPER, empty_aligned, has_aligned_rows

MAX_EXPERTS = 256
"""Maximum number of experts; every program loads all bounds at once."""
FEW_ROWS, SOME_ROWS = 16, 128
"""Mean rows per expert up to which tiles have few or some rows."""
PROGRAMS = 2
"""Programs of `grouped_matmul` per multiprocessor."""
BAND = 8
"""Blocks of rows that traverse the columns together, so that tiles of w are read from cache."""


class Tiling(NamedTuple):
    """Tile sizes of a product: `rows` by `columns`, with `depth` terms per step."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


HOPPER_TILES = (Tiling(16, 64, 128, 4, 4), Tiling(64, 128, 64, 4, 4), Tiling(128, 128, 64, 8, 3))
"""Tilings for few, some and many rows per expert; `PROGRAMS` of each fit a multiprocessor."""
OTHER_TILES = (Tiling(16, 64, 32, 4, 4), Tiling(64, 64, 32, 4, 3), Tiling(128, 64, 32, 8, 3))
HOPPER_GRAD_TILES = (Tiling(128, 128, 16, 8, 3), Tiling(128, 128, 64, 8, 3))
"""Tilings of `grouped_grad_w` for few rows per expert, and for more."""
OTHER_GRAD_TILES = (Tiling(64, 64, 16, 4, 3), Tiling(64, 64, 32, 4, 3))
FLOAT32_TILES = Tiling(32, 32, 32, 8, 2)


def _ranges(bounds: Tensor, _slots: int) -> Iterator[tuple[int, slice]]:
    for e, (first, last) in enumerate(pairwise(bounds.tolist())):
        yield e, slice(first, last)


def _grouped_matmul_torch(
    x: Tensor, w: Tensor, bounds: Tensor, out: Tensor | None = None, apart: bool = False
) -> Tensor:
    y = x.new_zeros(len(x), w.shape[1]) if out is None else out
    for e, rows in _ranges(bounds, len(x)):
        for row in range(rows.start, rows.stop) if apart else ():
            y[row] = w[e] @ x[row]
        if not apart:
            y[rows] = x[rows] @ w[e].T
    return y


def _grouped_grad_w_torch(grad_y: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    grad = x.new_empty(len(bounds) - 1, grad_y.shape[1], x.shape[1])
    for e, rows in _ranges(bounds, len(x)):
        grad[e] = grad_y[rows].T @ x[rows]
    return grad


@triton.jit
def _load_tile(
    source, matrix, row, column, num_rows, num_columns, stride_matrix, stride_row, stride_column,
    DESCRIBED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load a tile of one matrix of a stack, with or without TMA; 0 beyond its end."""
    if DESCRIBED:
        tile = source.load([matrix, row, column]).reshape(ROWS, COLUMNS)
    else:
        rows, columns = (row + tl.arange(0, ROWS))[:, None], (column + tl.arange(0, COLUMNS))[None]
        offset = rows.to(tl.int64) * stride_row + columns.to(tl.int64) * stride_column
        ptrs = source + matrix.to(tl.int64) * stride_matrix + offset
        tile = tl.load(ptrs, mask=(rows < num_rows) & (columns < num_columns), other=0.0)
    return tile


@triton.jit
def _grouped_matmul_kernel(
    x_tiles, w_tiles, bounds_ptr, y_ptr,
    S, E, N, K,
    stride_xe, stride_xm, stride_xk, stride_we, stride_wr, stride_wc,
    stride_b, stride_ym, stride_yn,
    DESCRIBED: tl.constexpr, ZEROS: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    # group 0 has the rows before all experts, groups 1..E those of experts, E + 1 the rows after
    offs_e = tl.arange(0, BLOCK_E)
    is_expert = (offs_e > 0) & (offs_e <= E)
    is_group = is_expert
    if ZEROS:
        is_group = offs_e < E + 2
    starts = bounds_ptr + (offs_e - 1) * stride_b
    begin = tl.load(starts, mask=(offs_e > 0) & (offs_e <= E + 1), other=0)
    end = tl.load(starts + stride_b, mask=offs_e <= E, other=S)
    begin, end = tl.maximum(begin, 0).to(tl.int32), tl.minimum(end, S).to(tl.int32)
    # number of blocks of rows of each group, and their cumulative sum
    blocks = tl.where(is_group, (tl.maximum(end - begin, 0) + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(blocks, 0)
    before = ends - blocks
    num_blocks = tl.sum(blocks, axis=0)
    columns = tl.cdiv(N, BLOCK_N)
    x_strides, w_strides = (stride_xe, stride_xm, stride_xk), (stride_we, stride_wr, stride_wc)

    for tile in range(tl.program_id(0), num_blocks * columns, tl.num_programs(0)):
        # band, block of rows and columns of the tile
        first = tile // (BAND * columns) * BAND
        height = tl.minimum(num_blocks - first, BAND)
        block = first + (tile - first * columns) % height
        n = (tile - first * columns) // height * BLOCK_N
        # search the group of the block: its matrix, first row and end
        mine = (before <= block) & (block < ends)
        group = tl.sum(tl.where(mine, offs_e, 0), axis=0)
        m = tl.sum(tl.where(mine, begin + (block - before) * BLOCK_M, 0), axis=0)
        last = tl.sum(tl.where(mine, end, 0), axis=0)
        # rows without an expert have no products and are stored as zeros
        steps = tl.where((group > 0) & (group <= E), tl.cdiv(K, BLOCK_K), 0)

        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(0, steps):
            k = step * BLOCK_K
            x = _load_tile(x_tiles, group * 0, m, k, S, K, *x_strides, DESCRIBED, BLOCK_M, BLOCK_K)
            if TRANSPOSED:
                w = _load_tile(
                    w_tiles, group - 1, k, n, K, N, *w_strides, DESCRIBED, BLOCK_K, BLOCK_N
                )
            else:
                w = _load_tile(
                    w_tiles, group - 1, n, k, N, K, *w_strides, DESCRIBED, BLOCK_N, BLOCK_K
                ).T
            acc = tl.dot(x, w, acc, input_precision="ieee")

        # store the rows of this group only
        offs_m = (m + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        offs_n = (n + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
        y_ptrs = y_ptr + offs_m * stride_ym + offs_n * stride_yn
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < last) & (offs_n < N))


@triton.jit
def _grouped_grad_w_kernel(
    grad_y_tiles, x_tiles, bounds_ptr, grad_ptr,
    S, N, K,
    stride_ye, stride_ym, stride_yn, stride_xe, stride_xm, stride_xk, stride_b,
    DESCRIBED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    columns = tl.cdiv(K, BLOCK_K)
    n = tl.program_id(0) // columns * BLOCK_N
    k = tl.program_id(0) % columns * BLOCK_K
    # rows of the expert, and the end of its full steps
    first = tl.maximum(tl.load(bounds_ptr + expert * stride_b), 0).to(tl.int32)
    last = tl.minimum(tl.load(bounds_ptr + (expert + 1) * stride_b), S).to(tl.int32)
    whole = first + tl.maximum(last - first, 0) // BLOCK_R * BLOCK_R
    of_y = (S, N, stride_ye, stride_ym, stride_yn)
    of_x = (S, K, stride_xe, stride_xm, stride_xk)

    # accumulate over the rows of the expert
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for row in range(first, whole, BLOCK_R):
        grad_y = _load_tile(grad_y_tiles, first * 0, row, n, *of_y, DESCRIBED, BLOCK_R, BLOCK_N)
        x = _load_tile(x_tiles, first * 0, row, k, *of_x, DESCRIBED, BLOCK_R, BLOCK_K)
        acc = tl.dot(grad_y.T, x, acc, input_precision="ieee")
    if whole < last:  # the remaining rows; those of the next expert are masked, as they may be NaN
        mask = (whole + tl.arange(0, BLOCK_R) < last)[:, None]
        grad_y = _load_tile(grad_y_tiles, first * 0, whole, n, *of_y, DESCRIBED, BLOCK_R, BLOCK_N)
        x = _load_tile(x_tiles, first * 0, whole, k, *of_x, DESCRIBED, BLOCK_R, BLOCK_K)
        grad_y, x = tl.where(mask, grad_y, 0.0), tl.where(mask, x, 0.0)
        acc = tl.dot(grad_y.T, x, acc, input_precision="ieee")

    offs_n = (n + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    offs_k = (k + tl.arange(0, BLOCK_K))[None, :]
    grad_ptrs = grad_ptr + expert * N * K + offs_n * K + offs_k
    tl.store(grad_ptrs, acc.to(grad_ptr.dtype.element_ty), mask=(offs_n < N) & (offs_k < K))


def _tiling(x: Tensor, experts: int, apart: bool = False) -> Tiling:
    """Choose the tiles of `grouped_matmul` from the mean rows per expert, the dtype and the GPU."""
    if x.dtype == torch.float32:
        return FLOAT32_TILES
    many = 0 if apart else (len(x) > FEW_ROWS * experts) + (len(x) > SOME_ROWS * experts)
    return (HOPPER_TILES if capability(x) == HOPPER else OTHER_TILES)[many]


def _grad_tiling(x: Tensor, experts: int) -> Tiling:
    """Choose the tiles of `grouped_grad_w`, which sums over rows of x."""
    if x.dtype == torch.float32:
        return FLOAT32_TILES
    tiles = HOPPER_GRAD_TILES if capability(x) == HOPPER else OTHER_GRAD_TILES
    return tiles[len(x) > FEW_ROWS * experts]


def _tiles_of(stack: Tensor, rows: int, columns: int) -> tuple[Any, tuple[int, ...]]:
    """Create a TMA descriptor of a stack or its aligned copy; without TMA, return strides."""
    if capability(stack) != HOPPER:
        return stack, stack.stride()
    if not has_aligned_rows(stack):
        number, height, width = stack.shape
        stack = empty_aligned(number, height, width, stack).copy_(stack)
    return described(stack, [1, rows, columns]), stack.stride()


def _grouped_matmul_triton(
    x: Tensor, w: Tensor, bounds: Tensor, out: Tensor | None = None, apart: bool = False
) -> Tensor:
    (slots, in_features), (experts, out_features, _) = x.shape, w.shape
    y = x.new_empty(slots, out_features) if out is None else out
    if y.numel() == 0:
        return y
    rows, columns, depth, num_warps, num_stages = _tiling(x, experts, apart)
    transposed = has_aligned_rows(w.mT) and not has_aligned_rows(w)
    x_tiles, x_strides = _tiles_of(x[None], rows, depth)
    if transposed:
        w_tiles, w_strides = _tiles_of(w.mT, depth, columns)
    else:
        w_tiles, w_strides = _tiles_of(w, columns, depth)
    # upper bound: each expert, and the rows before and after all of them, may add a short block
    tiles = (triton.cdiv(slots, rows) + experts + 1) * triton.cdiv(out_features, columns)
    _grouped_matmul_kernel[(min(tiles, PROGRAMS * num_processors(x)),)](
        x_tiles, w_tiles, bounds, y, slots, experts, out_features, in_features,
        *x_strides, *w_strides, *bounds.stride(), *y.stride(),
        DESCRIBED=capability(x) == HOPPER, ZEROS=out is None, TRANSPOSED=transposed,
        BLOCK_E=triton.next_power_of_2(experts + 2), BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=depth,
        BAND=BAND, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


def _grouped_grad_w_triton(grad_y: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    experts, out_features, in_features = len(bounds) - 1, grad_y.shape[1], x.shape[1]
    grad = x.new_empty(experts, out_features, in_features)
    if len(x) == 0:
        return grad.zero_()
    rows, columns, depth, num_warps, num_stages = _grad_tiling(x, experts)
    tiles = triton.cdiv(out_features, rows) * triton.cdiv(in_features, columns)
    y_tiles, y_strides = _tiles_of(grad_y[None], depth, rows)
    x_tiles, x_strides = _tiles_of(x[None], depth, columns)
    _grouped_grad_w_kernel[(tiles, experts)](
        y_tiles, x_tiles, bounds, grad, len(x), out_features, in_features,
        *y_strides, *x_strides, *bounds.stride(), DESCRIBED=capability(x) == HOPPER,
        BLOCK_R=depth, BLOCK_N=rows, BLOCK_K=columns, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return grad


grouped_matmul = Operation(
    "grouped_matmul", _grouped_matmul_triton, _grouped_matmul_torch,
    "x: real[S, K]; w: real[E, N, K]; bounds: int64[E + 1]; out: real[S, N]?; apart",
    where=(f"0 < E <= {MAX_EXPERTS}", "N > 0 and K > 0"),
)  # fmt: skip
"""Multiply rows, sorted by expert, by the matrix of their expert.

y[s, n] = sum over k of x[s, k] * w[e, n, k], for bounds[e] <= s < bounds[e + 1]

The gradient of x is the same product with `w.mT`.

Args:
    x: (S, K) bfloat16 or float32, any strides. On Hopper GPUs it is copied first unless its
        rows are contiguous and begin at multiples of 16 bytes.
    w: (E, N, K) like `x`, E at most 256, any strides; copied unless its rows or columns do so.
    bounds: (E + 1,) int64, ascending, within 0..S, which nothing checks.
    out: (S, N) like `x`: written and returned. Rows without an expert are not modified.
    apart: whether the bits of a row must not depend on other rows or their number.

Returns:
    (S, N) in the dtype of `x`, accumulated in float32; without `out`, rows without an expert
    are zeros.
"""
grouped_grad_w = Operation(
    "grouped_grad_w", _grouped_grad_w_triton, _grouped_grad_w_torch,
    "grad_y: real[S, N]; x: real[S, K]; bounds: int64[P]",
    where=(f"1 < P <= {MAX_EXPERTS + 1}", "N > 0 and K > 0"),
)  # fmt: skip
"""Compute the gradient of the matrices of `grouped_matmul`.

grad_w[e, n, k] = sum over bounds[e] <= s < bounds[e + 1] of grad_y[s, n] * x[s, k]

Args:
    grad_y: (S, N) bfloat16 or float32, any strides, copied as `x` of `grouped_matmul` is.
    x: (S, K) like `grad_y`.
    bounds: (E + 1,) int64, ascending, within 0..S, which nothing checks; E at most 256.

Returns:
    (E, N, K) in the dtype of `x`, accumulated in float32; zeros for an expert without rows.
"""

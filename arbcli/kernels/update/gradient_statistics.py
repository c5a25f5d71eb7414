"""Statistics of a gradient in one pass: slopes of the scales, and sums of squares.

slope[n, g] = sum over k in group g of grad * w, the slope of the loss in the log of a scale. The
squares are summed over the matrix, which shows whether the gradient is usable, and over its rows
and columns. Sums come in parts, one for each tile, so that adding them up in order gives the same
bits every time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import (
    add_low,
    add_remainder,
    digits_torch,
    native_arguments,
)
from arbcli.kernels.codec.layout import BLOCK, PLANE
from arbcli.kernels.codec.packed import Packed, load_scale, scale_of, scales_torch
from arbcli.kernels.codec.packing import first_digit, take_trit, trit_at, trit_positions
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.backend import row_chunks, tiles_of_a_program
from arbcli.kernels.runtime.operation import Operation, tl, triton

TILE = 128
"""Columns of a tile: as many whole groups as fit, and at least one."""
LARGE_STEPS, SMALL_STEPS = (16, True), (2, False)
"""Tiles of a program, and whether it loads the next tile before it reads one. `LARGE_STEPS` are for
large matrices of trits; with remainders more programs are faster."""
PART_ROWS = 64
"""Rows of a part of the native loop's sums over columns; `native.c` has it too."""


class GradientStatistics(NamedTuple):
    """Statistics of one pass over a gradient, in P, Q or P * Q parts."""

    slope: Tensor
    """(N, groups) float32."""
    slope_squares: Tensor
    """(P * Q,) float64, squares of the slope."""
    squares: Tensor
    """(P * Q,) float32, squares of the gradient."""
    rows: Tensor
    """(Q, N) float32, squares of each row; (0, N) unless asked for."""
    columns: Tensor
    """(P, K) float32, squares of each column; (0, K) unless asked for."""


class SignGradient(NamedTuple):
    """Signs and statistics of a gradient."""

    signs: Tensor
    """(N, K) int8."""
    statistics: GradientStatistics
    """Slopes of the signs, and squares of the gradient."""


def _gradient_statistics_torch(
    grad: Tensor, packed: Packed, factored: bool = False, signs: bool = False
) -> GradientStatistics:
    (num_rows, in_features) = grad.shape
    like: TensorOptions = {"dtype": torch.float32, "device": grad.device}
    group_size = packed.group_size
    whole = in_features // group_size
    slope = torch.empty(packed.exponent.shape, **like)
    rows = torch.empty(int(factored), num_rows, **like)
    columns = torch.zeros(int(factored), in_features, **like)
    squares = torch.zeros(1, **like)
    for part in row_chunks(grad):
        values = grad[part].float()
        product = digits_torch(packed, torch.float32, part)
        product *= torch.sign(values) if signs else values
        full = product[:, : whole * group_size].unflatten(1, (whole, group_size))
        torch.sum(full, dim=2, out=slope[part, :whole])
        if whole < slope.shape[1]:
            torch.sum(product[:, whole * group_size :], dim=1, out=slope[part, whole])
        torch.mul(values, values, out=product)
        row_squares = torch.sum(product, dim=1)
        squares += row_squares.sum()
        if factored:
            rows[0, part] = row_squares
            columns += product.sum(dim=0)
    slope *= scales_torch(packed.exponent, packed.fraction)
    wide = slope if slope.is_mps else slope.double()  # a GPU of Apple has no float64
    return GradientStatistics(slope, (wide * wide).sum()[None], squares, rows, columns)


def _gradient_statistics_native(
    grad: Tensor, packed: Packed, factored: bool = False, signs: bool = False
) -> GradientStatistics:
    (num_rows, in_features) = grad.shape
    like: TensorOptions = {"dtype": torch.float32, "device": grad.device}
    slope, rows = torch.empty(packed.exponent.shape, **like), torch.empty(1, num_rows, **like)
    columns = torch.empty(-(-num_rows // PART_ROWS) * factored, in_features, **like)
    grad = native.as_rows(grad)
    native.call(
        "gradient_statistics", *native_arguments(packed), grad, grad.stride(0),
        grad.dtype == torch.bfloat16, signs, slope, rows, columns if factored else None, num_rows,
        native.threads_for(grad.numel()),
    )  # fmt: skip
    squares = slope.double().square_().sum()[None]
    return GradientStatistics(slope, squares, rows.sum()[None], rows[: int(factored)], columns)


@triton.jit
def _gradient_statistics_kernel(
    grad_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr,
    slope_ptr, slope_squares_ptr, squares_ptr, rows_ptr, columns_ptr,
    N, K, num_groups, blocks, tiles,
    stride_gn, stride_gk, stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_sn, stride_cp,
    GROUP: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, HAS_FRACTION: tl.constexpr,
    INT8: tl.constexpr, NIBBLE: tl.constexpr,
    FACTORED: tl.constexpr, SIGNS: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Read one tile: a full block whose planes are groups for the first `blocks`, else groups."""
    tile_n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    slope_squares_ptr += tl.program_id(0)
    squares_ptr += tl.program_id(0)
    rows_ptr += tile.to(tl.int64) * N
    columns_ptr += tile_n.to(tl.int64) * stride_cp
    if tile < blocks:
        _read_planes(
            grad_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr,
            slope_ptr, slope_squares_ptr, squares_ptr, rows_ptr, columns_ptr,
            N, tile_n, tile,
            stride_gn, stride_gk, stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
            stride_an, stride_ak, trit_unit, low_unit, stride_sn,
            HAS_FRACTION, INT8, NIBBLE, FACTORED, SIGNS, BLOCK_N, STEPS, AHEAD,
        )  # fmt: skip
    else:  # after full blocks a row is packed like a row that begins there
        _read_groups(
            grad_ptr + 160 * blocks * stride_gk, packed_ptr + 32 * blocks * stride_pb,
            exponent_ptr + 5 * blocks * stride_eg, fraction_ptr + 5 * blocks * stride_fg,
            remainder_ptr + 160 * blocks * stride_ak,
            slope_ptr + 5 * blocks, slope_squares_ptr, squares_ptr, rows_ptr,
            columns_ptr + 160 * blocks,
            N, K - 160 * blocks, num_groups - 5 * blocks, tile_n, tile - blocks,
            stride_gn, stride_gk, stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
            stride_an, stride_ak, trit_unit, low_unit, stride_sn,
            GROUP, LANES, GROUPS, HAS_FRACTION, INT8, NIBBLE, FACTORED, SIGNS,
            256 // (GROUPS * LANES), BLOCK_N * STEPS * GROUPS * LANES // 256,
        )  # fmt: skip


@triton.jit
def _load_planes(
    pointers, strides, n, block, mask_n, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr
):  # fmt: skip
    """Load bytes, digits of scales and gradients of some rows of a full block.

    The gradients of five planes are followed by the remainders of int8 weights.
    """
    grad_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr = pointers
    of_grad, of_packed, of_exponent, of_fraction, of_remainder = strides
    offs_j, part = tl.arange(0, 32)[None, :], tl.arange(0, 8)[None, :]
    packed_ptrs = packed_ptr + n * of_packed[0] + (block * 32 + offs_j) * of_packed[1]
    byte = tl.load(packed_ptrs, mask=mask_n, other=0)
    mask, group = mask_n & (part < 5), block * 5 + part
    exponent_ptrs = exponent_ptr + n * of_exponent[0] + group * of_exponent[1]
    exponent = tl.load(exponent_ptrs, mask=mask, other=0)
    fraction = tl.zeros_like(exponent)
    if HAS_FRACTION:
        fraction_ptrs = fraction_ptr + n * of_fraction[0] + group * of_fraction[1]
        fraction = tl.load(fraction_ptrs, mask=mask, other=0)
    k = block * 160 + offs_j
    grad_ptrs, grads = grad_ptr + n * of_grad[0] + k * of_grad[1], ()
    for digit in tl.static_range(5):
        value = tl.load(grad_ptrs + 32 * digit * of_grad[1], mask=mask_n, other=0)
        grads = grads + (value,)  # noqa: RUF005 (triton knows no star)
    if INT8:
        low_ptrs = remainder_ptr + n * of_remainder[0] + k * of_remainder[1]
        for digit in tl.static_range(5):
            low = tl.load(low_ptrs + 32 * digit * of_remainder[1], mask=mask_n, other=0)
            grads = grads + (low,)  # noqa: RUF005
    return byte, exponent, fraction, grads


@triton.jit
def _read_planes(
    grad_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr,
    slope_ptr, slope_squares_ptr, squares_ptr, rows_ptr, columns_ptr,
    N, tile_n, block,
    stride_gn, stride_gk, stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_sn,
    HAS_FRACTION: tl.constexpr, INT8: tl.constexpr, NIBBLE: tl.constexpr,
    FACTORED: tl.constexpr, SIGNS: tl.constexpr,
    BLOCK_N: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Read a full block of five planes, each a group of 32, of `STEPS` times `BLOCK_N` rows.

    The results of a row, five slopes and its squares, are gathered in a tensor and stored at once.
    """
    part = tl.arange(0, 8)[None, :]
    half = tl.where(part % 2 == 0, -0.5, 0.5)  # of what `take_trit` returns
    slope_squares = tl.zeros((BLOCK_N, 8), dtype=tl.float32)
    matrix_squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    column_squares = (
        tl.zeros((BLOCK_N, 32), dtype=tl.float32), tl.zeros((BLOCK_N, 32), dtype=tl.float32),
        tl.zeros((BLOCK_N, 32), dtype=tl.float32), tl.zeros((BLOCK_N, 32), dtype=tl.float32),
        tl.zeros((BLOCK_N, 32), dtype=tl.float32),
    )  # fmt: skip
    first = tile_n.to(tl.int64) * (STEPS * BLOCK_N)
    pointers = grad_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr
    strides = (
        (stride_gn, stride_gk), (stride_pn, stride_pb), (stride_en, stride_eg),
        (stride_fn, stride_fg), (stride_an, stride_ak),
    )  # fmt: skip
    if AHEAD:
        n = (first + tl.arange(0, BLOCK_N))[:, None]
        ahead = _load_planes(pointers, strides, n, block, n < N, HAS_FRACTION, INT8)
    for step in range(STEPS):
        n = (first + step * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        mask_n = n < N
        if AHEAD:
            byte, exponent, fraction, grads = ahead
            mask = (n + BLOCK_N < N) & (step + 1 < STEPS)
            ahead = _load_planes(pointers, strides, n + BLOCK_N, block, mask, HAS_FRACTION, INT8)
        else:
            byte, exponent, fraction, grads = _load_planes(
                pointers, strides, n, block, mask_n, HAS_FRACTION, INT8
            )
        # digit by digit: squares of the gradient, and its products with the weights
        left = first_digit(byte)
        row_squares = tl.zeros((BLOCK_N, 32), dtype=tl.float32)
        slopes = tl.zeros((BLOCK_N, 8), dtype=tl.float32)
        summed = ()
        for digit in tl.static_range(4, -1, -1):
            value = grads[digit].to(tl.float32)
            squares = value * value
            row_squares += squares
            summed = (column_squares[digit] + squares,) + summed  # noqa: RUF005 (triton knows no star)
            if SIGNS:
                value = tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0))
            double, left = take_trit(left, digit)
            if INT8:
                trit = double * (0.5 if digit % 2 else -0.5)
                double = add_low(trit, grads[5 + digit], trit_unit, low_unit, NIBBLE)
            slopes = tl.where(part == digit, tl.sum(value * double, axis=1)[:, None], slopes)
        # a row's results: five slopes, scaled here once, and its sum of squares
        column_squares = summed
        row_total = tl.sum(row_squares, axis=1)
        matrix_squares += row_total
        slopes = tl.where(part == 5, row_total[:, None], slopes)
        mask, group = mask_n & (part < 5), block * 5 + part
        scale = scale_of(exponent, fraction)
        slope = slopes * (scale if INT8 else scale * half)
        tl.store(slope_ptr + n * stride_sn + group, slope, mask=mask)
        slope_squares += tl.where(mask, slope * slope, 0)
        if FACTORED:
            rows_ptrs = rows_ptr + n + tl.zeros_like(part)
            tl.store(rows_ptrs, slopes, mask=mask_n & (part == 5))
    # partial sums of this program, which `gradient_gains` sums
    tl.store(slope_squares_ptr, tl.sum(slope_squares.to(tl.float64)))
    tl.store(squares_ptr, tl.sum(matrix_squares))
    if FACTORED:
        columns_ptrs = columns_ptr + block * 160
        for digit in tl.static_range(5):
            column_total = tl.sum(column_squares[digit], axis=0)
            tl.store(columns_ptrs + 32 * digit + tl.arange(0, 32), column_total)


@triton.jit
def _read_groups(
    grad_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr,
    slope_ptr, slope_squares_ptr, squares_ptr, rows_ptr, columns_ptr,
    N, K, num_groups, tile_n, tile_g,
    stride_gn, stride_gk, stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_sn,
    GROUP: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, HAS_FRACTION: tl.constexpr,
    INT8: tl.constexpr, NIBBLE: tl.constexpr,
    FACTORED: tl.constexpr, SIGNS: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Read `STEPS` tiles of `BLOCK_N` rows and `GROUPS` groups, each of `LANES` lanes."""
    offs_g = tile_g * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUPS * LANES)
    if GROUP == LANES:
        k = tile_g * (GROUPS * LANES) + lane
        mask_k = k < K
    else:
        k = (tile_g * GROUPS + lane // LANES) * GROUP + lane % LANES
        mask_k = (k < K) & (lane % LANES < GROUP)
    offs_byte, factor = trit_positions(k, K)
    column_squares = tl.zeros((BLOCK_N, GROUPS * LANES), dtype=tl.float32)
    row_squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    slope_squares = tl.zeros((BLOCK_N, GROUPS), dtype=tl.float64)
    for step in range(STEPS):
        n = (tile_n.to(tl.int64) * STEPS + step) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = n < N
        mask = mask_n[:, None] & mask_k[None, :]
        mask_g = mask_n[:, None] & (offs_g < num_groups)[None, :]
        # scales, gradients and digits of the tile; zeros where masked
        scale = load_scale(
            exponent_ptr, fraction_ptr, n[:, None], offs_g[None, :], mask_g,
            stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
        )  # fmt: skip
        grad_ptrs = grad_ptr + n[:, None] * stride_gn + k[None, :] * stride_gk
        grad = tl.load(grad_ptrs, mask=mask, other=0).to(tl.float32)
        packed_ptrs = packed_ptr + n[:, None] * stride_pn + offs_byte[None, :] * stride_pb
        byte = tl.load(packed_ptrs, mask=mask, other=0).to(tl.uint32)
        value = grad
        if SIGNS:
            value = tl.where(grad > 0, 1.0, tl.where(grad < 0, -1.0, 0.0))
        offset = n[:, None] * stride_an + k[None, :] * stride_ak
        trit = trit_at(byte, factor[None, :])
        product = value * add_remainder(
            trit, remainder_ptr, offset, mask, trit_unit, low_unit, INT8, NIBBLE
        )
        # the slope of a group: its sum of products, times its scale
        slope = tl.sum(tl.reshape(product, (BLOCK_N, GROUPS, LANES)), axis=2) * scale
        tl.store(slope_ptr + n[:, None] * stride_sn + offs_g[None, :], slope, mask=mask_g)
        slope = tl.where(mask_g, slope, 0).to(tl.float64)
        slope_squares += slope * slope
        # squares, by column and by row
        squares = grad * grad
        column_squares += squares
        if FACTORED:
            row_total = tl.sum(squares, axis=1)
            row_squares += row_total
            tl.store(rows_ptr + n, row_total, mask=mask_n)
    tl.store(slope_squares_ptr, tl.sum(slope_squares))
    if FACTORED:
        tl.store(squares_ptr, tl.sum(row_squares))
        column_squares = tl.sum(column_squares, axis=0)
        tl.store(columns_ptr + k, column_squares, mask=mask_k)
    else:
        tl.store(squares_ptr, tl.sum(column_squares))


def _gradient_statistics_triton(
    grad: Tensor, packed: Packed, factored: bool = False, signs: bool = False
) -> GradientStatistics:
    (rows, columns), groups, group_size = grad.shape, packed.num_groups, packed.group_size
    large_steps = LARGE_STEPS if packed.remainder is None else SMALL_STEPS
    block_n, (steps, ahead) = 8, tiles_of_a_program(grad, SMALL_STEPS, large_steps)
    tiles_n = triton.cdiv(rows, block_n * steps)
    blocks = columns // BLOCK if group_size == PLANE else 0  # whose planes are groups
    lanes = triton.next_power_of_2(group_size)
    groups_of_tile = max(PLANE if blocks else TILE, lanes) // lanes
    tiles = blocks + triton.cdiv(groups - 5 * blocks, groups_of_tile)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=grad.device)

    statistics = (
        empty(rows, groups),
        empty(tiles_n * tiles, dtype=torch.float64),
        empty(tiles_n * tiles),
        empty(tiles * factored, rows),
        empty(tiles_n * factored, columns),
    )
    _gradient_statistics_kernel[(tiles_n * tiles,)](
        grad, *packed.all_pointers, *statistics, rows, columns, groups, blocks, tiles,
        *grad.stride(), *packed.all_strides, *packed.worths, groups, columns,
        **packed.all_constants, LANES=lanes, GROUPS=groups_of_tile,
        FACTORED=factored, SIGNS=signs, BLOCK_N=block_n, STEPS=steps, AHEAD=ahead, num_warps=1,
    )  # fmt: skip
    return GradientStatistics(*statistics)


gradient_statistics = Operation(
    "gradient_statistics", _gradient_statistics_triton, _gradient_statistics_torch,
    "grad: real[N, K]; packed: packed[N, K]; factored; signs",
    native=_gradient_statistics_native, where=("N > 0 and K > 0",),
)  # fmt: skip
"""Sum gradient times weight over every group, and the squares of the gradient, in one pass.

Args:
    grad: (N, K) float32 or bfloat16, dL/dw, not empty, any strides.
    packed: the matrix, N rows by K weights.
    factored: whether to sum the squares of rows and columns too.
    signs: whether the slope is that of the gradient's signs.
"""

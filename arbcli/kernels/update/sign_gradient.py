"""The signs of a weight's gradient, from inputs and output gradients, a tile at a time.

    g[n, k] = sum over m of grad_y[m, n] * x[m, k]
    signs[n, k] = sign(g[n, k]),   slope[n, j] = sum over k in group j of signs[n, k] * w[n, k]

For rules that need no more of a gradient than its signs: g lives in registers, and no float of the
shape of the weight is stored. The squares of g are summed too, which shows whether it can be
used; a NaN has the sign 0.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import Packed, load_scale
from arbcli.kernels.codec.packing import trit_at, trit_positions
from arbcli.kernels.runtime.backend import chunk_elements
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.gradient_statistics import (
    GradientStatistics,
    SignGradient,
    gradient_statistics,
)

TILE = 128
"""Columns of a tile: as many whole groups as fit, and at least one."""
PARTS = 4
"""Minimum number of parts into which the torch backend splits a matrix."""


def _found(signs: Tensor, slope: Tensor, slope_squares: Tensor, squares: Tensor) -> SignGradient:
    none = (squares.new_empty(0, size) for size in signs.shape)
    return SignGradient(signs, GradientStatistics(slope, slope_squares, squares, *none))


def _sign_gradient_torch(grad_y: Tensor, x: Tensor, packed: Packed) -> SignGradient:
    rows, columns, x = packed.out_features, x.shape[1], x.float()
    signs = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    step = max(1, min(-(-rows // PARTS), chunk_elements(1 << 22) // columns))
    part_statistics = []
    for start in range(0, rows, step):
        part_rows = slice(start, min(start + step, rows))
        grad = grad_y[:, part_rows].T.float() @ x
        part_statistics.append(gradient_statistics(grad, packed.rows(part_rows), signs=True))
        signs[part_rows] = grad.sign_().nan_to_num_(0).to(torch.int8)
    sums = zip(*(part[:3] for part in part_statistics), strict=True)
    return _found(signs, *(torch.cat(parts) for parts in sums))


@triton.jit
def _sign_gradient_kernel(
    grad_y_ptr, x_ptr, packed_ptr, exponent_ptr, fraction_ptr,
    signs_ptr, slope_ptr, slope_squares_ptr, squares_ptr,
    M, N, K, num_groups, tiles,
    stride_ym, stride_yn, stride_xm, stride_xk, stride_pn, stride_pb, stride_en, stride_eg,
    stride_fn, stride_fg,
    GROUP: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, HAS_FRACTION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile_n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # columns of GROUPS groups, each padded to LANES lanes
    lane = tl.arange(0, GROUPS * LANES)
    k = (tile * GROUPS + lane // LANES) * GROUP + lane % LANES
    mask_k = (k < K) & (lane % LANES < GROUP)
    mask_n = n < N
    # gradient of the tile, summed over the rows of x
    grad = tl.zeros((BLOCK_N, GROUPS * LANES), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        y = tl.load(  # [BLOCK_N, BLOCK_M]
            grad_y_ptr + m[None, :] * stride_ym + n[:, None] * stride_yn,
            mask=(m < M)[None, :] & mask_n[:, None], other=0.0,
        )  # fmt: skip
        x = tl.load(  # [BLOCK_M, lanes]
            x_ptr + m[:, None] * stride_xm + k[None, :] * stride_xk,
            mask=(m < M)[:, None] & mask_k[None, :], other=0.0,
        )  # fmt: skip
        grad = tl.dot(y, x, grad, input_precision="ieee")
    mask = mask_n[:, None] & mask_k[None, :]
    # signs, and the squares of this tile
    sign = (grad > 0).to(tl.int32) - (grad < 0).to(tl.int32)
    tl.store(signs_ptr + n[:, None] * K + k[None, :], sign.to(tl.int8), mask=mask)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.where(mask, grad * grad, 0)))

    # slope of each scale: signs times trits, summed over a group, times the scale
    offs_byte, factor = trit_positions(k, K)
    byte = tl.load(
        packed_ptr + n[:, None] * stride_pn + offs_byte[None, :] * stride_pb, mask=mask, other=0
    ).to(tl.uint32)
    product = tl.where(mask, sign.to(tl.float32) * trit_at(byte, factor[None, :]), 0)
    slope = tl.sum(tl.reshape(product, (BLOCK_N, GROUPS, LANES)), axis=2)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    mask_g = mask_n[:, None] & (group < num_groups)[None, :]
    slope *= load_scale(
        exponent_ptr, fraction_ptr, n[:, None], group[None, :], mask_g,
        stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
    )  # fmt: skip
    tl.store(slope_ptr + n[:, None] * num_groups + group[None, :], slope, mask=mask_g)
    slope = tl.where(mask_g, slope, 0).to(tl.float64)
    tl.store(slope_squares_ptr + tl.program_id(0), tl.sum(slope * slope))


def _sign_gradient_triton(grad_y: Tensor, x: Tensor, packed: Packed) -> SignGradient:
    (length, columns), rows = x.shape, packed.out_features
    lanes = triton.next_power_of_2(packed.group_size)
    groups = max(TILE, lanes) // lanes
    low = x.dtype == torch.bfloat16
    block_n = 64 if low else 16
    tiles = triton.cdiv(packed.num_groups, groups)
    programs = triton.cdiv(rows, block_n) * tiles
    signs = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    slope = torch.empty(rows, packed.num_groups, dtype=torch.float32, device=x.device)
    slope_squares = torch.empty(programs, dtype=torch.float64, device=x.device)
    squares = torch.empty(programs, dtype=torch.float32, device=x.device)
    _sign_gradient_kernel[(programs,)](
        grad_y, x, *packed.pointers, signs, slope, slope_squares, squares,
        length, rows, columns, packed.num_groups, tiles,
        *grad_y.stride(), *x.stride(), *packed.strides, **packed.constants,
        LANES=lanes, GROUPS=groups, BLOCK_M=64 if low else 16, BLOCK_N=block_n, num_warps=8,
    )  # fmt: skip
    return _found(signs, slope, slope_squares, squares)


sign_gradient = Operation(
    "sign_gradient", _sign_gradient_triton, _sign_gradient_torch,
    "grad_y: real[M, N]; x: real[M, K]; packed: packed[N, K]",
    where=("packed.remainder is None", "N > 0 and K > 0"),
)  # fmt: skip
"""Compute the signs of the gradient of a matrix, and the slopes of its scales from them.

Args:
    grad_y: (M, N) float32 or bfloat16, any strides: the gradient of x @ w.T.
    x: (M, K) like it, any strides.
    packed: w, N rows by K weights that are trits, not empty.
"""

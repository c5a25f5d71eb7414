"""Add the slopes of a micro-batch to those of a step: t <- t + round(w * s).

s is the slope of each scale over its root-mean-square across the matrix, clipped to +-16, and w the
weight of the micro-batch. t is int16 in units of 2**-11. A step clips its slopes to +-3 after their
sum was divided by its root-mean-square, as those of a single batch are. Squares of t come in parts,
one for each program, so that adding them up in order gives the same bits every time.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import count_tiles, tile_of_program
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.direction import round_to_int

BLOCK_N, BLOCK_G = 8, 128
CLIP = 16 << 16
"""Clipping threshold, as a gain of 2**16 makes of slopes."""
UNIT = 2.0**-21
"""Product of a slope in units of 2**-16 and a weight in units of 2**-16, in units of 2**-11."""
MAX_SLOPE = 2**15 - 1


def _add_slopes_torch(
    total: Tensor, slope: Tensor, slope_gain: Tensor, weight: Tensor, ok: Tensor
) -> Tensor:
    if ok:
        s = (slope * slope_gain).clamp_(-CLIP, CLIP).mul_(weight.float() * UNIT).round_()
        total.copy_(s.add_(total).clamp_(-MAX_SLOPE, MAX_SLOPE))
    return sum_squares(total)


def sum_squares(total: Tensor) -> Tensor:
    """Sum the squares of a total, (N, groups) int16, in one part: (1,) float64, float32 on MPS."""
    wide = total.float() if total.is_mps else total.double()  # a GPU of Apple has no float64
    return wide.square_().sum().view(1)


@triton.jit
def _add_slopes_kernel(
    total_ptr, slope_ptr, slope_gain_ptr, weight_ptr, ok_ptr, squares_ptr, N, num_groups,
    stride_tn, stride_tg, stride_sn, stride_sg,
    CLIP: tl.constexpr, UNIT: tl.constexpr, MAX_SLOPE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    n, g, mask = tile_of_program(N, num_groups, BLOCK_N, BLOCK_G)
    total_ptrs = total_ptr + n * stride_tn + g * stride_tg
    total = tl.load(total_ptrs, mask=mask, other=0).to(tl.int32)  # [BLOCK_N, BLOCK_G]
    if tl.load(ok_ptr) != 0:
        slope = tl.load(slope_ptr + n * stride_sn + g * stride_sg, mask=mask, other=0)
        s = tl.minimum(tl.maximum(slope * tl.load(slope_gain_ptr), -CLIP), CLIP)
        total += round_to_int(s * (tl.load(weight_ptr).to(tl.float32) * UNIT))
        total = tl.minimum(tl.maximum(total, -MAX_SLOPE), MAX_SLOPE)
        tl.store(total_ptrs, total.to(tl.int16), mask=mask)
    squares = total.to(tl.float64)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(squares * squares))


def _add_slopes_triton(
    total: Tensor, slope: Tensor, slope_gain: Tensor, weight: Tensor, ok: Tensor
) -> Tensor:
    rows, groups = slope.shape
    programs = count_tiles(rows, groups, BLOCK_N, BLOCK_G)
    squares = torch.empty(programs, dtype=torch.float64, device=slope.device)
    if programs:
        _add_slopes_kernel[(programs,)](
            total, slope, slope_gain, weight, ok, squares, rows, groups,
            *total.stride(), *slope.stride(),
            CLIP=CLIP, UNIT=UNIT, MAX_SLOPE=MAX_SLOPE, BLOCK_N=BLOCK_N, BLOCK_G=BLOCK_G,
            enable_fp_fusion=False,
        )  # fmt: skip
    return squares


add_slopes = Operation(
    "add_slopes", _add_slopes_triton, _add_slopes_torch,
    "total: int16[N, G]; slope: float32[N, G]; slope_gain: float32[]; weight, ok: int32[]",
)  # fmt: skip
"""Add slopes to a total, in place.

Args:
    total: (N, groups) int16, in units of 2**-11; saturates.
    slope: (N, groups) float32.
    slope_gain: float32 scalar tensor, 2**16 over the root-mean-square of the slope.
    weight: int32 scalar tensor, in units of 2**-16.
    ok: int32 scalar tensor; if 0, nothing is added.

Returns:
    (P,) float64, sums of squares of the new total.
"""

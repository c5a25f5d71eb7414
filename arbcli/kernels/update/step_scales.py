"""Step scales: v <- clip(v - SR(s * gain)), v = 128 E + F, in place.

s is the slope of each scale over its root-mean-square across the matrix: one float32 product,
clipped to +-3 and rounded to int32 in units of 2**-16. With 16 fractional bits
d = (s * gain) >> shift, rounded stochastically: floor((d + r) / 2**16). v saturates with E in
-96..31.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import HIGHEST_EXPONENT, LOWEST_EXPONENT, OCTAVE
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import LARGE_ELEMENTS, count_tiles, tile_of_program
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.direction import round_to_int
from arbcli.kernels.update.random_bits import random_bits, random_words

CLIP = 3 << 16
"""A slope saturates here, at 3 times its root-mean-square."""
LOWEST, HIGHEST = LOWEST_EXPONENT * OCTAVE, HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1
FEW_GROUPS, FEW_AT_ONCE = 64, 32
"""Maximum groups per row, and groups per tile, of small matrices: equal tiles share a launch."""


def _step_scales_torch(
    exponent: Tensor, fraction: Tensor, slope: Tensor, slope_gain: Tensor, key: Tensor,
    gain: Tensor, shift: Tensor, ok: Tensor,
) -> None:  # fmt: skip
    if ok:
        rows, columns = (
            torch.arange(size, dtype=torch.int32, device=exponent.device) for size in slope.shape
        )
        step = (slope * slope_gain).clamp_(-CLIP, CLIP).round_().to(torch.int32)
        step.mul_(gain).bitwise_right_shift_(shift)
        step += random_bits(key, rows, columns).bitwise_and_(0xFFFF)
        v = exponent.to(torch.int32) * OCTAVE + fraction
        v.sub_(step.bitwise_right_shift_(16)).clamp_(LOWEST, HIGHEST)
        exponent.copy_(v >> 7)
        fraction.copy_(v & 127)


def _step_scales_native(
    exponent: Tensor, fraction: Tensor, slope: Tensor, slope_gain: Tensor, key: Tensor,
    gain: Tensor, shift: Tensor, ok: Tensor,
) -> None:  # fmt: skip
    state = exponent, fraction
    if not all(map(native.has_dense_rows, state)):
        _step_scales_torch(*state, slope, slope_gain, key, gain, shift, ok)
    elif ok:
        slope = native.as_rows(slope.float())
        native.call(
            "step_scales", exponent, exponent.stride(0), fraction, fraction.stride(0), slope,
            slope.stride(0), slope_gain, int(key), int(gain), int(shift), *slope.shape,
        )  # fmt: skip


@triton.jit
def _step_scales_kernel(
    exponent_ptr, fraction_ptr, slope_ptr, slope_gain_ptr, key_ptr, gain_ptr, shift_ptr, ok_ptr,
    N, num_groups,
    stride_en, stride_eg, stride_fn, stride_fg, stride_sn, stride_sg,
    CLIP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    if tl.load(ok_ptr) == 0:
        return
    n, g, mask = tile_of_program(N, num_groups, BLOCK_N, BLOCK_G)
    exponent_ptrs = exponent_ptr + n * stride_en + g * stride_eg
    fraction_ptrs = fraction_ptr + n * stride_fn + g * stride_fg
    v = tl.load(exponent_ptrs, mask=mask, other=0).to(tl.int32) * 128
    v += tl.load(fraction_ptrs, mask=mask, other=0).to(tl.int32)
    slope = tl.load(slope_ptr + n * stride_sn + g * stride_sg, mask=mask, other=0).to(tl.float32)
    s = round_to_int(tl.minimum(tl.maximum(slope * tl.load(slope_gain_ptr), -CLIP), CLIP))
    step = (s * tl.load(gain_ptr)) >> tl.load(shift_ptr)
    step += (random_words(tl.load(key_ptr), n, g) & 0xFFFF).to(tl.int32)
    v = tl.minimum(tl.maximum(v - (step >> 16), LOWEST), HIGHEST)
    tl.store(exponent_ptrs, (v >> 7).to(tl.int8), mask=mask)
    tl.store(fraction_ptrs, (v & 127).to(tl.int8), mask=mask)


def _step_scales_triton(
    exponent: Tensor, fraction: Tensor, slope: Tensor, slope_gain: Tensor, key: Tensor,
    gain: Tensor, shift: Tensor, ok: Tensor,
) -> None:  # fmt: skip
    if slope.numel():
        rows, groups = slope.shape
        small = groups <= FEW_GROUPS and slope.numel() < LARGE_ELEMENTS // PLANE
        block_g = FEW_AT_ONCE if small else min(triton.next_power_of_2(groups), 128)
        block_n = 1024 // block_g
        _step_scales_kernel[(count_tiles(rows, groups, block_n, block_g),)](
            exponent, fraction, slope, slope_gain, key, gain, shift, ok, rows, groups,
            *exponent.stride(), *fraction.stride(), *slope.stride(),
            CLIP=CLIP, LOWEST=LOWEST, HIGHEST=HIGHEST, BLOCK_N=block_n, BLOCK_G=block_g,
            enable_fp_fusion=False,
        )  # fmt: skip


step_scales = Operation(
    "step_scales", _step_scales_triton, _step_scales_torch,
    "exponent, fraction: int8[N, G]; slope: int16|float32[N, G]; slope_gain: float32[]; "
    "key, gain, shift, ok: int32[]",
    native=_step_scales_native,
)  # fmt: skip
"""Step the scales of a matrix in place.

Args:
    exponent: (N, groups) int8, E.
    fraction: (N, groups) int8, F.
    slope: (N, groups) float32, or int16, of any unit.
    slope_gain: float32 scalar tensor, 2**16 over the root-mean-square of the slope, so that
        s = slope * slope_gain is in units of 2**-16; clipped to +-3.
    key: int32 scalar tensor, from `stream_keys`.
    gain: int32 scalar tensor, at most 2**12.
    shift: int32 scalar tensor; d = (s * gain) >> shift, in units of 2**-16 of v.
    ok: int32 scalar tensor; if 0, nothing changes.
"""

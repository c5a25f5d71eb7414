"""Validate a gradient by its sums of squares, and compute the gains of its direction.

A gradient is used if the sum of its squares is within 2**-120 .. 2**120, where float32 is accurate
for squares. A larger sum counts as not finite, a smaller one as zero. The slope is divided by its
root-mean-square, and so is the gradient if a rule averages it. For the factored direction, rows and
columns are divided by the roots of their running mean squares, which include this gradient.

A running statistic is two int8 digits of its log2 in steps of 1/128: log2 = whole + fraction / 128,
with whole = -128 before the first gradient. The mean squares are averaged, and the log of the new
mean is rounded stochastically: a mean of logs would follow them late, and rounding to nearest would
drop small changes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.direction import UNIT
from arbcli.kernels.update.gradient_statistics import GradientStatistics
from arbcli.kernels.update.random_bits import random_bits, random_words

UNSET = -128
"""The whole digit of a statistic that has seen no gradient."""
LOWEST, HIGHEST = -127 * 128, 127 * 128 + 127
"""128 log2 of a statistic saturates here, the pair of digits as one."""
MIN_SQUARE, MAX_SQUARE = 2.0**-120, 2.0**120
"""A gradient is used if the sum of its squares is in this range."""
SMALL = 2.0**-40
"""A smaller sum of squares is multiplied by 1 / SMALL**2 while its mean is taken."""
FLOOR = 2.0**-120
"""Added to the mean squares of rows and columns, of which some may be 0."""
AT_ONCE = tl.constexpr(3)
"""Loads before the first addition, as each takes longer than all the additions."""


class GradientGains(NamedTuple):
    """Validity of a gradient, and its multipliers."""

    ok: Tensor
    """int32 scalar; 0 if it is refused."""
    slope: Tensor
    """float32 scalar, 2**16 over the root-mean-square of the slope; 0 where that is 0."""
    unit: Tensor
    """(1,) float32, 2**16 over the root-mean-square of the gradient; 0 if it is refused."""
    rows: Tensor
    """(N,) float32, of arbitrary size in common; (0,) unless factored."""
    columns: Tensor
    """(K,) float32; (0,) unless factored."""


def _gradient_gains_torch(
    slope: Tensor, slope_squares: Tensor, squares: Tensor, rows: Tensor, columns: Tensor,
    row_statistic: Tensor | None, column_statistic: Tensor | None, row_key: Tensor,
    column_key: Tensor, refused: Tensor, nonfinite: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = num_rows, num_columns = rows.shape[1], columns.shape[1]
    size, ok, slope_gain, unit = _judge(slope, slope_squares, squares, sizes, refused, nonfinite)
    if row_statistic is None or column_statistic is None:
        return ok, slope_gain, unit, squares.new_empty(0), squares.new_empty(0)
    statistic = torch.cat([row_statistic, column_statistic])
    if size:
        value = torch.cat([rows.sum(0).div_(num_columns), columns.sum(0).div_(num_rows)])
        keys = torch.stack((row_key, column_key))
        index = torch.arange(max(sizes), dtype=torch.int32, device=rows.device)
        row_bits, column_bits = random_bits(keys, torch.zeros_like(keys), index).bitwise_and_(
            0xFFFF
        )
        words = torch.cat([row_bits[:num_rows], column_bits[:num_columns]])
        statistic = _add_statistic_torch(statistic, value.add_(FLOOR), words)
        row_statistic.copy_(statistic[:num_rows])
        column_statistic.copy_(statistic[num_rows:])
    gains = statistic_value(statistic).clamp_(min=1e-38).rsqrt_()
    row_gain, column_gain = gains.split(sizes)
    row_gain *= size
    return ok, slope_gain, unit, row_gain, column_gain


def _gradient_gains_native(
    slope: Tensor, slope_squares: Tensor, squares: Tensor, rows: Tensor, columns: Tensor,
    row_statistic: Tensor | None, column_statistic: Tensor | None, row_key: Tensor,
    column_key: Tensor, refused: Tensor, nonfinite: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = num_rows, num_columns = rows.shape[1], columns.shape[1]
    size, ok, slope_gain, unit = _judge(slope, slope_squares, squares, sizes, refused, nonfinite)
    gains = []
    for sums, statistic, key, count, factor in (
        (rows, row_statistic, row_key, num_columns, size),
        (columns, column_statistic, column_key, num_rows, 1.0),
    ):
        gains.append(squares.new_empty(0 if statistic is None else sums.shape[1]))
        if statistic is not None:
            native.call(
                "average_statistic", sums, len(sums), statistic, *statistic.stride(), key,
                size > 0, float(count), factor, gains[-1], len(statistic),
                native.threads_for(sums.numel()),
            )  # fmt: skip
    return ok, slope_gain, unit, gains[0], gains[1]


def _judge(
    slope: Tensor, slope_squares: Tensor, squares: Tensor, sizes: tuple[int, int], refused: Tensor,
    nonfinite: Tensor,
) -> tuple[float, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the RMS of a gradient, 0 if it cannot be used, and ok, slope gain and unit."""
    total, mean = float(squares.sum()), float(slope_squares.sum()) / slope.numel()
    usable = MIN_SQUARE <= total <= MAX_SQUARE
    refused += not usable
    nonfinite |= not total <= MAX_SQUARE
    ok = torch.full_like(refused, usable, dtype=torch.int32)
    gain = min(UNIT / math.sqrt(mean), 3e38) if mean > 0 else 0.0
    slope_gain = torch.full_like(refused, gain, dtype=torch.float32)
    size = math.sqrt(total / math.prod(sizes)) if usable else 0.0
    return size, ok, slope_gain, squares.new_full((1,), UNIT / size if usable else 0.0)


def _add_statistic_torch(statistic: Tensor, value: Tensor, word: Tensor) -> Tensor:
    """Average values into statistics; return the new digits."""
    mean_square = torch.lerp(statistic_value(statistic), value, 0.01)
    mean_square = torch.where(statistic[:, 0] == UNSET, value, mean_square)
    t = mean_square.log2_().mul_(128).clamp_(LOWEST, HIGHEST)
    low = torch.floor(t)
    # the same as floor(t + word / 65536), which would lose bits of the word to a large t
    above = (t - low).mul_(65536).to(torch.int32).add_(word).bitwise_right_shift_(16)
    digits = low.to(torch.int32).add_(above)
    return torch.stack((digits >> 7, digits & 127), dim=1).to(torch.int8)


def statistic_value(statistic: Tensor) -> Tensor:
    """Decode (L, 2) int8 digits to (L,) float32: 2**(whole + fraction / 128), 0 where unset."""
    whole, fraction = statistic.to(torch.float32).unbind(dim=1)
    return torch.where(whole == UNSET, 0, torch.exp2(whole + fraction / 128))


@triton.jit
def sum_parts(ptr, parts, dtype: tl.constexpr):
    """Add up contiguous partial sums inside a kernel, always in the same order."""
    total = tl.zeros((1024,), dtype=dtype)
    for start in range(0, parts, 1024 * AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            offs = start + 1024 * i + tl.arange(0, 1024)
            loaded = loaded + (tl.load(ptr + offs, mask=offs < parts, other=0),)  # noqa: RUF005
        for i in tl.static_range(AT_ONCE):
            total += loaded[i]
    return tl.sum(total)


@triton.jit
def _decode(whole, fraction):
    """Decode digits to float32 inside a kernel, as `statistic_value` does."""
    log = whole.to(tl.float32) + fraction.to(tl.float32) / 128
    return tl.where(whole == -128, 0.0, tl.exp2(log))


@triton.jit
def _average(
    parts_ptr, statistic_ptr, key_ptr, gain_ptr, tile, parts, L, count, ok, factor,
    stride_sl, stride_sd,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, FLOOR: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Average the mean squares of some rows or columns into their statistics; store their gains."""
    offs_l = tile * BLOCK_L + tl.arange(0, BLOCK_L)
    mask = offs_l < L
    statistic_ptrs = statistic_ptr + offs_l.to(tl.int64) * stride_sl
    whole = tl.load(statistic_ptrs, mask=mask, other=0)  # [BLOCK_L] int8
    fraction = tl.load(statistic_ptrs + stride_sd, mask=mask, other=0)
    if ok:
        # sum the parts of each row or column: several loads before the first use
        total = tl.zeros((BLOCK_P, BLOCK_L), dtype=tl.float32)
        for start in range(0, parts, BLOCK_P * AT_ONCE):
            loaded = ()
            for i in tl.static_range(AT_ONCE):
                offs_p = start + BLOCK_P * i + tl.arange(0, BLOCK_P)
                ptrs = parts_ptr + offs_p.to(tl.int64)[:, None] * L + offs_l[None, :]
                here = (offs_p < parts)[:, None] & mask[None, :]
                loaded = loaded + (tl.load(ptrs, mask=here, other=0),)  # noqa: RUF005
            for i in tl.static_range(AT_ONCE):
                total += loaded[i]
        # exponential moving average of the mean square
        value = tl.sum(total, axis=0) / count + FLOOR
        mean_square = tl.where(whole == -128, value, 0.99 * _decode(whole, fraction) + 0.01 * value)
        # its log2, rounded stochastically to steps of 1/128, as two digits
        t = tl.minimum(tl.maximum(128 * tl.log2(mean_square), LOWEST), HIGHEST)
        word = random_words(tl.load(key_ptr), tl.zeros_like(offs_l), offs_l) & 0xFFFF
        low = tl.floor(t)
        above = ((t - low) * 65536).to(tl.int32)
        digits = low.to(tl.int32) + ((above + word.to(tl.int32)) >> 16)
        whole, fraction = (digits >> 7).to(tl.int8), (digits & 127).to(tl.int8)
        tl.store(statistic_ptrs, whole, mask=mask)
        tl.store(statistic_ptrs + stride_sd, fraction, mask=mask)
    # gain: the inverse root of the average
    running = tl.maximum(_decode(whole, fraction), 1e-38)
    tl.store(gain_ptr + offs_l, factor * tl.rsqrt(running), mask=mask)


@triton.jit
def _gradient_gains_kernel(
    slope_squares_ptr, squares_ptr, rows_ptr, columns_ptr, row_statistic_ptr, column_statistic_ptr,
    row_key_ptr, column_key_ptr, refused_ptr, nonfinite_ptr,
    ok_ptr, slope_gain_ptr, unit_ptr, row_gain_ptr, column_gain_ptr,
    N, K, num_weights, num_slopes, parts, row_parts, column_parts,
    stride_rl, stride_rd, stride_cl, stride_cd,
    MIN_SQUARE: tl.constexpr, MAX_SQUARE: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    FLOOR: tl.constexpr, SMALL: tl.constexpr, FACTORED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Decide in the first program if the gradient is usable; others average rows, then columns."""
    # every program computes the sum of squares
    total = sum_parts(squares_ptr, parts, tl.float32)
    ok = (total >= MIN_SQUARE) & (total <= MAX_SQUARE)
    # the mean of a small total would be subnormal, which the GPU's roots take for zero
    scale = tl.where(total < SMALL, 1 / SMALL, 1.0)
    mean_square = total * scale * scale / num_weights
    tile = tl.program_id(0) - 1
    row_tiles = tl.cdiv(N, BLOCK_L)
    if tile < 0:
        # validity, and the factor to unit RMS in units of 2**-16
        tl.store(ok_ptr, ok.to(tl.int32))
        tl.store(unit_ptr, tl.where(ok, 65536 * scale * tl.rsqrt(mean_square), 0))
        # count refused gradients, and note one that is not finite
        if not ok:
            tl.store(refused_ptr, tl.load(refused_ptr) + 1)
            if not (total <= MAX_SQUARE):
                tl.store(nonfinite_ptr, 1)
        # gain of the slopes of scales
        mean = sum_parts(slope_squares_ptr, parts, tl.float64) / num_slopes
        gain = tl.where(mean > 0, 65536 / tl.sqrt(tl.maximum(mean, 1e-300)), 0)
        tl.store(slope_gain_ptr, tl.minimum(gain, 3e38).to(tl.float32))
    elif FACTORED:
        if tile < row_tiles:
            size = tl.sqrt(mean_square) / scale
            _average(
                rows_ptr, row_statistic_ptr, row_key_ptr, row_gain_ptr,
                tile, row_parts, N, K, ok, size, stride_rl, stride_rd,
                LOWEST, HIGHEST, FLOOR, BLOCK_P, BLOCK_L,
            )  # fmt: skip
        else:
            _average(
                columns_ptr, column_statistic_ptr, column_key_ptr, column_gain_ptr,
                tile - row_tiles, column_parts, K, N, ok, 1.0, stride_cl, stride_cd,
                LOWEST, HIGHEST, FLOOR, BLOCK_P, BLOCK_L,
            )  # fmt: skip


def _gradient_gains_triton(
    slope: Tensor, slope_squares: Tensor, squares: Tensor, rows: Tensor, columns: Tensor,
    row_statistic: Tensor | None, column_statistic: Tensor | None, row_key: Tensor,
    column_key: Tensor, refused: Tensor, nonfinite: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (row_parts, num_rows), (column_parts, num_columns) = rows.shape, columns.shape
    factored, block_l, tiles = row_statistic is not None, 64, 1
    row_gain, column_gain = (squares.new_empty(n * factored) for n in (num_rows, num_columns))
    ok, slope_gain = torch.empty_like(refused, dtype=torch.int32), squares.new_empty(())
    unit = squares.new_empty(1)
    statistics, strides = (squares, squares), [0, 0, 0, 0]
    if row_statistic is not None and column_statistic is not None:
        tiles += triton.cdiv(num_rows, block_l) + triton.cdiv(num_columns, block_l)
        statistics = (row_statistic, column_statistic)
        strides = [*row_statistic.stride(), *column_statistic.stride()]
    _gradient_gains_kernel[(tiles,)](
        slope_squares, squares, rows, columns, *statistics, row_key, column_key,
        refused, nonfinite, ok, slope_gain, unit, row_gain, column_gain,
        num_rows, num_columns, float(num_rows * num_columns), float(slope.numel()),
        len(squares), row_parts, column_parts, *strides,
        MIN_SQUARE=MIN_SQUARE, MAX_SQUARE=MAX_SQUARE, LOWEST=LOWEST, HIGHEST=HIGHEST, FLOOR=FLOOR,
        SMALL=SMALL, FACTORED=factored, BLOCK_P=16, BLOCK_L=block_l,
    )  # fmt: skip
    return ok, slope_gain, unit, row_gain, column_gain


def gradient_gains(
    statistics: GradientStatistics, row_statistic: Tensor | None, column_statistic: Tensor | None,
    row_key: Tensor, column_key: Tensor, refused: Tensor, nonfinite: Tensor,
) -> GradientGains:  # fmt: skip
    """Judge a gradient, and add its mean squares to running statistics, in place.

    A statistic becomes 0.99 old + 0.01 new, or new if unset. The log of that is rounded to 1/128 as
    floor(t + r / 65536), t = 128 log2, with r the low 16 bits of the random word (key, 0, l).

    Args:
        statistics: of the gradient; with sums of rows and columns for the factored direction.
        row_statistic: (N, 2) int8 digits, whole and fraction, any strides; None unless factored.
        column_statistic: (K, 2) int8 digits; None unless factored.
        row_key: int32 scalar tensor, from `stream_keys`.
        column_key: int32 scalar tensor, from `stream_keys`.
        refused: int64 scalar tensor; 1 is added where the gradient cannot be used, and the
            statistics do not change.
        nonfinite: int64 scalar tensor; becomes 1 where that is because it is not finite.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    running = row_statistic, column_statistic
    gains = GRADIENT_GAINS(*statistics, *running, row_key, column_key, refused, nonfinite)
    return GradientGains(*gains)


def slope_gain(slope: Tensor, slope_squares: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gain of slopes that are not those of a single gradient.

    Args:
        slope: (N, groups) float32 or int16.
        slope_squares: (P,) float64, partial sums of its squares.

    Returns:
        ok: int32 scalar, 1.
        gain: float32 scalar, 2**16 over the root-mean-square of the slope; 0 where that is 0.
    """
    ones = torch.ones_like(slope_squares, dtype=torch.float32)
    none = ones.new_empty(0, 1)
    key, counter = (ones.new_zeros((), dtype=dtype) for dtype in (torch.int32, torch.int64))
    gains = GRADIENT_GAINS(
        slope, slope_squares, ones, none.expand(0, len(slope)), none, None, None, key, key, counter,
        counter,
    )  # fmt: skip
    return gains[0], gains[1]


GRADIENT_GAINS = Operation(
    "gradient_gains", _gradient_gains_triton, _gradient_gains_torch,
    "slope: float32|int16[N, G]; slope_squares: float64|float32[P] dense; squares: float32[P] "
    "dense; rows: float32[R, N] dense; columns: float32[C, K] dense; row_statistic: int8[N, 2]?; "
    "column_statistic: int8[K, 2]?; row_key, column_key: int32[]; refused, nonfinite: int64[]",
    native=_gradient_gains_native, 
    where=(
        "slope_squares.dtype == (torch.float32 if slope.is_mps else torch.float64)",
        "(row_statistic is None) == (column_statistic is None)",
        "row_statistic is None or (R > 0 and C > 0)",
    ),
)  # fmt: skip

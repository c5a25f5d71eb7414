"""Round float weights to digits and scales: w is close to bf16(z / U * s), with |z| at most L.

L and U follow from the rule: 127 and 64 with `moment`, 21 and 16 with `nibble`. A scale s is one of
bf16(2 ** (v / 128)); of several v with the same s the least is used. For a group of weights s0 is
the least scale at which no weight is beyond L, so that the largest has the last level. The error of
the group, the sum of (decoded - w) ** 2, is measured for s0 and the scales that are so many places
above or below it as `PLACES` says, and the first of the least error is taken: smaller scales clip
the largest weights, and larger ones may happen to lie better. z is w / (s / U) rounded to nearest.

A number of a vector has a scale of its own: z is any from L / 2 to L, with the scales on both sides
of |w| U / z, and again the least error counts; among equal ones z is closest to 3 L / 4.

Weights that came from decoding are on our own grid, where some scale has no error at all. It may be
any from s0 on, as the largest weight of a trained group may have any level. With `own_grid` the
least scale without an error is taken; groups without one are rounded as others.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import HIGHEST_EXPONENT, LOWEST_EXPONENT, OCTAVE, ROOTS, num_groups
from arbcli.kernels.codec.packing import pack_trits
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import backend_of
from arbcli.model.layers.vector import SCALE_OF_ZERO, VectorWeight
from arbcli.model.packed import TernaryTensor

PLACES = (0, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8)
"""Candidate scales, as offsets from s0 in the list of scales."""
CLIPPED = 2
"""Places below s0 where the scale of a clipped group of our own grid may be."""
SEEN_FIRST = 4
"""Weights of a group, the largest, that a scale of our own grid must fit before all are read."""
ROUNDED_AT_ONCE, NUMBERS_AT_ONCE = 1 << 18, 1 << 13
"""Number of weights that are rounded at a time, and of those with a scale each."""
MAX_SHIFTED = 126
"""Octaves that errors are shifted by at most, so that their squares are floats at any scale."""
ZERO = 0
"""v of a group of zeros."""


class Grid(NamedTuple):
    """Integer levels of an update rule."""

    largest: int
    """L, the largest magnitude of z."""
    unit: int
    """U, the unit of z."""


class Rounded(NamedTuple):
    """Digits and scales of a matrix."""

    z: Tensor
    """(N, K) int8."""
    v: Tensor
    """(N, groups) int32."""


def grid_of(tensor: TernaryTensor) -> Grid:
    """Return the integer levels of a tensor whose weights are all digits; of a byte at most."""
    return Grid(min(tensor.rule.radix + tensor.rule.remainder_max, 127), tensor.packed.unit)


@cache
def _octave() -> tuple[Tensor, Tensor]:
    """List the distinct scales in [1, 2), ascending, and the least F of each."""
    roots, fractions = ROOTS[:OCTAVE].view(torch.float32).unique(return_inverse=True)
    first = torch.full((len(roots),), OCTAVE).scatter_reduce(
        0, fractions, torch.arange(OCTAVE), "amin"
    )
    return roots, first


def _scale(place: Tensor) -> Tensor:
    """Return the scale at an index of the list of scales, float32; index 0 is scale 1."""
    roots, _ = _octave()
    return torch.ldexp(roots[place % len(roots)], place // len(roots))


def _v(place: Tensor) -> Tensor:
    roots, first = _octave()
    return (place // len(roots) * OCTAVE + first[place % len(roots)]).to(torch.int32)


def _place_above(least: Tensor) -> Tensor:
    """Return the index of the smallest scale that is at least a positive number, float64."""
    roots, _ = _octave()
    mantissa, exponent = torch.frexp(least)
    index = torch.searchsorted(roots.double(), 2 * mantissa)
    return _clamped((exponent - 1) * len(roots) + index)


def _clamped(place: Tensor) -> Tensor:
    """Clamp places to the range of scales."""
    count = len(_octave()[0])
    return place.clamp(LOWEST_EXPONENT * count, (HIGHEST_EXPONENT + 1) * count - 1)


def _levels(weight: Tensor, place: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round (M, g) weights at (M,) places: z, and the decoded weights; both float32."""
    step = (_scale(place) / grid.unit)[:, None]
    z = (weight / step).round_().clamp_(-grid.largest, grid.largest)
    return z, (z * step).bfloat16().float()


def _round_groups(weight: Tensor, grid: Grid, own_grid: bool) -> tuple[Tensor, Tensor]:
    """Round (M, g) groups, none of them zeros: z, float32, and places."""
    peak = weight.abs().amax(dim=1).double()
    first = _place_above(peak * grid.unit / (grid.largest + 0.5))
    chosen, remaining = first.clone(), torch.arange(len(weight))
    if own_grid:
        exact = _exact_places(weight, first, grid)
        is_exact = exact != _NONE
        chosen, remaining = torch.where(is_exact, exact, chosen), (~is_exact).nonzero().flatten()
    if len(remaining):
        part, least = weight[remaining], torch.full((len(remaining),), torch.inf)
        exponent = torch.frexp(peak[remaining]).exponent.clamp(-MAX_SHIFTED, MAX_SHIFTED)
        shift = torch.ldexp(torch.ones(len(remaining), 1), -exponent[:, None])
        for offset in PLACES:
            place = _clamped(first[remaining] + offset)
            error = _sums_of_rows(((_levels(part, place, grid)[1] - part) * shift).square_())
            better = error < least
            least = torch.where(better, error, least)
            chosen[remaining] = torch.where(better, place, chosen[remaining])
    return _levels(weight, chosen, grid)[0], chosen


def _sums_of_rows(x: Tensor) -> Tensor:
    """Add up each row of (M, g), halves first: the same bits as the native loop's."""
    while (size := x.shape[1]) > 1:
        half = (size + 1) // 2
        x[:, : size - half] += x[:, half:]
        x = x[:, :half]
    return x.flatten()


def _round_native(weight: Tensor, group_size: int, grid: Grid) -> Rounded:
    """Round all groups of a matrix in one pass; on a core seven times as fast as torch."""
    rows, columns = weight.shape
    z = torch.empty(rows, columns, dtype=torch.int8)
    v = torch.empty(rows, num_groups(columns, group_size), dtype=torch.int32)
    roots, first = _octave()
    offsets = torch.tensor(PLACES)
    native.call(
        "round_groups", weight.contiguous(), z, v, roots, first.to(torch.int32), offsets,
        len(roots), len(offsets), rows, columns, group_size, *grid,
        LOWEST_EXPONENT, HIGHEST_EXPONENT, OCTAVE, native.threads_for(weight.numel()),
    )  # fmt: skip
    return Rounded(z, v)


_NONE = torch.iinfo(torch.int64).min


def _exact_places(weight: Tensor, first: Tensor, grid: Grid) -> Tensor:
    """Return the first scale index at which (M, g) groups have no error, or `_NONE`."""
    exact_places = torch.full_like(first, _NONE)
    left = torch.arange(len(weight))
    count = min(SEEN_FIRST, weight.shape[1])
    large = weight.gather(1, weight.abs().topk(count, dim=1).indices)
    octaves = grid.largest.bit_length()
    for offset in range(-CLIPPED, octaves * len(_octave()[0])):
        place = _clamped(first[left] + offset)
        fits = _is_exact(large[left], place, grid).nonzero().flatten()
        fits = fits[_is_exact(weight[left[fits]], place[fits], grid)]
        exact_places[left[fits]] = place[fits]
        keep = torch.ones(len(left), dtype=torch.bool)
        keep[fits] = False
        left = left[keep]
        if not len(left):
            break
    return exact_places


def _is_exact(weight: Tensor, place: Tensor, grid: Grid) -> Tensor:
    return (_levels(weight, place, grid)[1] == weight).all(dim=1)


def _round_numbers(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round (M, 1) numbers, none of them 0, each with a scale of its own: z and places.

    Several pairs of z and scale decode to the same number. The pair of the decoded number is
    chosen, so that a second rounding of decoded numbers changes nothing.
    """
    parts = []
    for numbers in weight.split(NUMBERS_AT_ONCE):
        decoded = _closest_numbers(numbers, grid)[0]
        parts.append(_closest_numbers(decoded, grid)[1:])
    z, places = zip(*parts, strict=True)
    return torch.cat(z), torch.cat(places)


def _closest_numbers(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Try all z from L / 2: the closest decoded numbers, their z and places."""
    middle = 3 * grid.largest // 4
    every = sorted(range(-(-grid.largest // 2), grid.largest + 1), key=lambda z: abs(z - middle))
    levels = torch.tensor(every).repeat_interleave(2)  # with the places above a number and below
    places = _place_above(weight.abs().double() * grid.unit / levels)
    places[:, 1::2] = _clamped(places[:, 1::2] - 1)
    z = weight.sign() * levels
    decoded = (z * (_scale(places) / grid.unit)).bfloat16().float()
    best = (decoded - weight).abs().argmin(dim=1, keepdim=True)  # the first of equal ones
    return decoded.gather(1, best), z.gather(1, best), places.gather(1, best).flatten()


def round_weights(weight: Tensor, group_size: int, grid: Grid, own_grid: bool = False) -> Rounded:
    """Round a matrix.

    Args:
        weight: (N, K) float32, finite.
        group_size: neighbours of a row that share a scale.
        grid: the levels of its rule.
        own_grid: whether the weights may have been decoded by this package.
    """
    if backend_of(weight) == "native" and not own_grid:
        return _round_native(weight, group_size, grid)
    return _round_chunks(weight, group_size, ZERO, lambda part: _round_groups(part, grid, own_grid))


def round_vector(weight: Tensor, grid: Grid) -> Rounded:
    """Round (N, 1) float32 numbers, each with a scale of its own."""
    middle = SCALE_OF_ZERO * grid.unit / (3 * grid.largest // 4)
    zero = int(_v(_place_above(torch.tensor(middle, dtype=torch.float32).double())))
    return _round_chunks(weight, 1, zero, lambda part: _round_numbers(part, grid))


def _round_chunks(
    weight: Tensor, group_size: int, zero: int, run: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Rounded:
    """Round the groups of some rows at a time, all but those of zeros."""
    rows, columns = weight.shape
    groups = num_groups(columns, group_size)
    z = torch.empty(rows, columns, dtype=torch.int8)
    v = torch.empty(rows, groups, dtype=torch.int32)
    step = max(1, ROUNDED_AT_ONCE // (groups * group_size))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        flat = functional.pad(weight[part], (0, groups * group_size - columns)).view(-1, group_size)
        used = flat.any(dim=1)
        levels, places = torch.zeros_like(flat), torch.full((len(flat),), zero, dtype=torch.int32)
        if used.any():
            levels[used], chosen = run(flat[used])
            places[used] = _v(chosen)
        z[part] = levels.view(-1, groups * group_size)[:, :columns].to(torch.int8)
        v[part] = places.view(-1, groups)
    return Rounded(z, v)


def round_scales(scales: Tensor) -> Tensor:
    """Round float32 scales of any shape to the closest in the list of scales.

    Returns:
        v, int32 of the same shape; `ZERO` for 0.
    """
    used = scales > 0
    above = _place_above(torch.where(used, scales, 1.0).double())
    below = _clamped(above - 1)
    apart = [(_scale(place) - scales).abs() for place in (above, below)]
    return torch.where(used, _v(torch.where(apart[0] <= apart[1], above, below)), ZERO)


def group_peaks(weight: Tensor, group_size: int) -> Tensor:
    """Return the largest magnitude of each group of (R, K) weights, (R, groups)."""
    padding = -weight.shape[1] % group_size
    return functional.pad(weight, (0, padding)).unflatten(1, (-1, group_size)).abs().amax(dim=2)


def are_ternary(weight: Tensor, group_size: int) -> bool:
    """Return whether each group of (R, K) weights has one magnitude besides 0."""
    peaks = group_peaks(weight, group_size).repeat_interleave(group_size, dim=1)
    sizes = weight.abs()
    return bool(((sizes == 0) | (sizes == peaks[:, : weight.shape[1]])).all())


@torch.no_grad()
def put_trits(tensor: TernaryTensor, rows: slice, weight: Tensor, scales: Tensor) -> Tensor:
    """Set some rows of a tensor that reads trits: T = clip(round(w / s), -1, 1).

    The remainder is set to w / s - T. Rounding s to a representable scale changes it by at most
    half a per cent, which changes no trit.

    Args:
        tensor: on the CPU.
        rows: its rows.
        weight: (R, K) float32, finite.
        scales: float32 scales of the groups, (R, groups), or of all, ().

    Returns:
        The decoded rows minus T * s, (R, K) float32.
    """
    rule, size, columns = tensor.rule, tensor.group_size, weight.shape[1]
    groups = num_groups(columns, size)
    scales = scales.expand(len(weight), groups)
    by_weight = scales.repeat_interleave(size, dim=1)[:, :columns]
    share = torch.where(by_weight > 0, weight * (1 / by_weight), 0.0)
    trits = share.round().clamp_(-1, 1)
    remainders = ((share - trits) * rule.radix).round_()
    remainders.clamp_(-rule.remainder_max, rule.remainder_max)
    return _set(tensor, rows, trits, remainders, round_scales(scales)) - trits * by_weight


@torch.no_grad()
def put(tensor: TernaryTensor, rows: slice, weight: Tensor, own_grid: bool) -> Tensor:
    """Set some rows of a tensor that reads all digits to the weights that are closest.

    Args:
        tensor: on the CPU.
        rows: its rows.
        weight: (R, K) float32, finite.
        own_grid: whether the weights may have been decoded by this package.

    Returns:
        The decoded rows, (R, K) float32.
    """
    grid, rule = grid_of(tensor), tensor.rule
    if isinstance(tensor, VectorWeight):
        z, v = round_vector(weight, grid)
    else:
        z, v = round_weights(weight, tensor.group_size, grid, own_grid)
    wide, half = z.to(torch.int16), rule.radix // 2
    trits = (wide > half).to(torch.int8) - (wide < -half).to(torch.int8)
    return _set(tensor, rows, trits, wide - trits * rule.radix, v)


def _set(tensor: TernaryTensor, rows: slice, trits: Tensor, low: Tensor, v: Tensor) -> Tensor:
    """Set trits, remainders and scales of some rows; return the decoded rows."""
    tensor.trits[rows] = pack_trits(trits.to(torch.int8))
    tensor.rule.start(tensor.state, rows, low.to(torch.int8))
    tensor.exponent[rows] = (v // OCTAVE).to(torch.int8)
    tensor.fraction[rows] = (v % OCTAVE).to(torch.int8)
    return decode_weight(tensor.packed.rows(rows), torch.float32)

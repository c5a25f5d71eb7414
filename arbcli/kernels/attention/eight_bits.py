"""Keys and values in eight bits: eight-bit codes, and one power of two per vector.

An *entry* is the key or value of one position and head: d numbers x ~ code * 2**(e + 1 - room).
Codes are e4m3, or integers in -127..127. e is the octave of the entry's largest magnitude less one,
so that the octave of infinity, 128, fits int8 and an entry that is not finite stays so. `room` is
the octave to which the largest magnitude is scaled: 7 for e4m3, whose maximum is 448, and 6 for
integers. A code times a power of two is exact in bfloat16, so decoding does not round.

e4m3 has three mantissa bits at every magnitude, so its error is about 2.7 % of an entry's norm.
Integers have a uniform step, which suits entries whose maximum is a few times their mean, such as
normalised keys: see docs/performance.md.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import from_e4m3
from arbcli.kernels.matmul.quantise_rows import E4M3, largest_of_rows, to_e4m3
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.update.direction import round_to_int

ROOM = {E4M3: 7, torch.int8: 6}
"""Octave to which the largest magnitude of an entry is scaled, by dtype of the codes."""


def quantise_entries(x: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round entries to eight bits.

    Args:
        x: (..., d) float32 or bfloat16.
        stored: float8_e4m3fn or int8.

    Returns:
        (..., d) codes in `stored`, and (...) int8 exponents.
    """
    values, room = x.float(), ROOM[stored]
    field = (values.abs().amax(dim=-1).view(torch.int32) >> 23).clamp(min=8)
    inverse = ((254 + room - field) << 23).view(torch.float32)
    scaled = values * inverse[..., None]
    codes = scaled if stored == E4M3 else scaled.round().clamp(max=127)
    return codes.to(stored), (field - 128).to(torch.int8)


def decode_entries(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode entries, exactly in float32 and bfloat16.

    Args:
        codes: (..., d), as `quantise_entries` returns them.
        exponents: (...) int8.
        dtype: dtype of the result.

    Returns:
        (..., d) of `dtype`.
    """
    power = ((exponents.to(torch.int32) + 128) << 23).view(torch.float32)
    scale = power * 2.0 ** -ROOM[codes.dtype]
    return (codes.float() * scale[..., None]).to(dtype)


def round_entries(x: Tensor, stored: torch.dtype, rotated: int = 0) -> Tensor:
    """Quantise and decode entries, (..., d); dtype and shape do not change.

    Args:
        x: (..., d).
        stored: float8_e4m3fn or int8.
        rotated: number of elements that are not rounded, see `split_rotated`.
    """
    if rotated == x.shape[-1]:
        return x
    if rotated:
        kept, others = split_rotated(x, rotated)
        return join_rotated(kept, round_entries(others, stored))
    return decode_entries(*quantise_entries(x, stored), x.dtype)


def split_rotated(x: Tensor, rotated: int) -> tuple[Tensor, Tensor]:
    """Split the elements of heads into rotary ones and others.

    Args:
        x: (..., d).
        rotated: number of rotary elements: those of the first pairs (i, i + d / 2).

    Returns:
        (..., rotated), and (..., d - rotated).
    """
    first, second = x.chunk(2, dim=-1)
    half = rotated // 2
    whole = torch.cat((first[..., :half], second[..., :half]), dim=-1)
    return whole, torch.cat((first[..., half:], second[..., half:]), dim=-1)


def join_rotated(rotated: Tensor, others: Tensor) -> Tensor:
    """Invert `split_rotated`: (..., rotated) and (..., d - rotated) to (..., d)."""
    pairs = zip(rotated.chunk(2, dim=-1), others.chunk(2, dim=-1), strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim=-1)


@triton.jit
def _codes_of(scaled, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Round scaled float32 to codes."""
    if E4M3:  # noqa: SIM108 (of constants, triton compiles one branch of a statement only)
        codes = to_e4m3(scaled, NATIVE)
    else:
        codes = tl.minimum(round_to_int(scaled), 127).to(tl.int8)
    return codes


@triton.jit
def quantise_entry(x, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Quantise one entry, [BLOCK_D] float32, padded with zeros: codes, and [1] int8 exponent."""
    ROOM: tl.constexpr = 7 if E4M3 else 6
    field = largest_of_rows(x[None, :]).to(tl.int32, bitcast=True) >> 23
    field = tl.maximum(field, 8)
    scaled = x * ((254 + ROOM - field) << 23).to(tl.float32, bitcast=True)
    return _codes_of(scaled, E4M3, NATIVE), (field - 128).to(tl.int8)


@triton.jit
def quantise_halves(x1, x2, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Quantise one entry of two halves, [BLOCK_H] float32: codes of both, and an int8 exponent."""
    ROOM: tl.constexpr = 7 if E4M3 else 6
    first = tl.abs(x1).to(tl.int32, bitcast=True)  # bits of magnitudes are ordered like the numbers
    second = tl.abs(x2).to(tl.int32, bitcast=True)
    field = tl.maximum(tl.maximum(tl.max(first, axis=0), tl.max(second, axis=0)) >> 23, 8)
    inverse = ((254 + ROOM - field) << 23).to(tl.float32, bitcast=True)
    x1, x2 = x1 * inverse, x2 * inverse
    x1, x2 = _codes_of(x1, E4M3, NATIVE), _codes_of(x2, E4M3, NATIVE)
    return x1, x2, (field - 128).to(tl.int8)


@triton.jit
def numbers_of(codes, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Convert codes to float32, exactly and without scaling."""
    if E4M3:
        return from_e4m3(codes, NATIVE)
    return codes.to(tl.float32)


@triton.jit
def scale_of_entry(exponent, E4M3: tl.constexpr):
    """Build the float32 scales of entries from their int8 exponents."""
    power = ((exponent.to(tl.int32) + 128) << 23).to(tl.float32, bitcast=True)
    return power * (0.0078125 if E4M3 else 0.015625)  # 2**-7, 2**-6

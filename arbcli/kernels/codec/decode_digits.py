"""Decode `int8` weights, all digits of z = T * P + A: w[n, k] = bf16(z[n, k] / U * scale).

The unit U is P, or the next power of two. z has nine bits with an int8 remainder and at most six
with one of four bits, and the scale eight, so that z / U * scale is exact in float32 and rounded
once, to bf16. All kernels, backends and references compute the same weight.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import ParamSpec

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import BLOCK
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.codec.packing import (
    digit_of,
    in_planes,
    unpack_trits_reference,
    unpack_trits_torch,
)
from arbcli.kernels.codec.scales import ROOTS, load_scale, scales_torch
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import Matrix
from arbcli.kernels.runtime.backend import uses_native
from arbcli.kernels.runtime.operation import Case, Operation, Timing

P = ParamSpec("P")
ROWS = 32
"""Rows per program, one block of each."""


def digits_reference(packed: Packed) -> Tensor:
    """Compute T, or z / U if the weights are all digits, in float64."""
    trits = unpack_trits_reference(packed.trits, packed.in_features).double()
    if packed.remainder is None:
        return trits
    low = packed.remainder.to(torch.int64)
    low = (low % 16 + 8) % 16 - 8 if packed.nibble else low
    z = trits * packed.radix + low * packed.low
    return z / 2 ** math.ceil(math.log2(packed.radix))


def scales_reference(packed: Packed) -> Tensor:
    """Compute the scale of each weight, in float64, without rounding."""
    v = packed.exponent.to(torch.float64) * 128
    if packed.fraction is not None:
        v = v + packed.fraction.to(torch.float64)
    scale = torch.exp2(v / 128).repeat_interleave(packed.group_size, dim=1)
    return scale[:, : packed.in_features]


def decode_digits_reference(packed: Packed) -> Tensor:
    """Decode in float64, with scales and weights rounded to bf16."""
    scale = scales_reference(packed).to(torch.bfloat16).double()
    return (digits_reference(packed) * scale).to(torch.bfloat16)


def digits_torch(packed: Packed, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """Compute T, or z / U if the weights are all digits, exactly in float32.

    The result is exact in bfloat16 too, unless the weights of the two digits are fading.
    """
    packed = packed if rows is None else packed.rows(rows)
    trits = unpack_trits_torch(packed.trits, packed.in_features, dtype)
    if packed.remainder is None:
        return trits
    low = packed.remainder << 4 >> 4 if packed.nibble else packed.remainder
    return trits.mul_(packed.radix).add_(low.to(dtype), alpha=packed.low).mul_(1 / packed.unit)


def decode_digits_torch(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode a matrix of trits or of all digits, with one multiplication per weight."""
    in_features, group_size = packed.in_features, packed.group_size
    faded = packed.radix + packed.low * 128 > 256  # exceeds the eight bits of bfloat16
    weight = digits_torch(packed, torch.float32 if faded else dtype)
    scale = scales_torch(packed.exponent, packed.fraction).to(weight.dtype)[..., None]
    whole = in_features // group_size
    full = weight[:, : whole * group_size].unflatten(1, (whole, group_size))
    full *= scale[:, :whole]
    if whole * group_size < in_features:
        weight[:, whole * group_size :] *= scale[:, whole]
    if packed.remainder is not None and weight.dtype != torch.bfloat16:
        weight.copy_(weight.bfloat16())  # a product with a trit is exact
    return weight.to(dtype)


def decode_digits_native(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode a matrix with the native loop, to float32 or bfloat16."""
    rows, in_features = packed.out_features, packed.in_features
    weight = torch.empty(rows, in_features, dtype=dtype, device=packed.trits.device)
    bf16, threads = dtype == torch.bfloat16, native.threads_for(weight.numel())
    native.call("decode", *native_arguments(packed), weight, bf16, rows, threads)
    return weight


def native_arguments(packed: Packed) -> tuple[Tensor | int | None, ...]:
    """List the arguments of native loops for a packed matrix."""
    packed = packed.map(native.as_rows)
    parts = packed.trits, packed.exponent, packed.fraction, packed.remainder
    strides = (0 if part is None else part.stride(0) for part in parts)
    worths = packed.radix, packed.low, packed.unit
    sizes = packed.in_features, packed.group_size, *worths, packed.nibble
    return *parts, ROOTS, *strides, *sizes


def decode_digits(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode a matrix with the native loop if it supports device and dtype, otherwise with torch.

    Raises:
        ValueError: shapes or dtypes of the matrix do not match.
    """
    packed.check()
    known = dtype in (torch.float32, torch.bfloat16)
    run = decode_digits_native if known and uses_native(packed.trits) else decode_digits_torch
    return run(packed, dtype)


@triton.jit
def add_remainder(
    trit, remainder_ptr, offset, mask, of_trit, of_low, DIGITS: tl.constexpr, NIBBLE: tl.constexpr
):
    """Convert trits to float32 z / U if `DIGITS`; `offset` is the index of each weight's remainder.

    A trit is worth `of_trit` in units of the scale, and a unit of the remainder `of_low`.
    """
    if DIGITS:
        low = tl.load(remainder_ptr + offset, mask=mask, other=0).to(tl.int32)
        if NIBBLE:
            low = (low << 28) >> 28
        trit = trit * of_trit + low.to(tl.float32) * of_low
    return trit


@triton.jit
def round_weight(weight, DIGITS: tl.constexpr):
    """Round float32 weights to bf16, to nearest even; weights of trits are exact in bf16."""
    if DIGITS:
        bits = weight.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        weight = rounded.to(tl.float32, bitcast=True)
    return weight


@triton.jit
def _decode_digits_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
    N, K, blocks,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, of_trit, of_low, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr,
    DIGITS: tl.constexpr, NIBBLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Decode one block of `ROWS` rows."""
    block = tl.program_id(0) % blocks
    n = ((tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    width = tl.minimum((K - block * 160 + 4) // 5, 32)
    if width == 32:  # offsets known to the compiler, so that loads are vectorised
        _decode_planes(
            packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
            n, block, 32, N, K,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
            stride_an, stride_ak, of_trit, of_low, stride_wn,
            GROUP, HAS_FRACTION, DIGITS, NIBBLE, GROUP % 32 == 0,
        )  # fmt: skip
    else:
        _decode_planes(
            packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
            n, block, width, N, K,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
            stride_an, stride_ak, of_trit, of_low, stride_wn,
            GROUP, HAS_FRACTION, DIGITS, NIBBLE, False,
        )  # fmt: skip


@triton.jit
def _decode_planes(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
    n, block, width, N, K,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, of_trit, of_low, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr,
    DIGITS: tl.constexpr, NIBBLE: tl.constexpr, ONE_SCALE: tl.constexpr,
):  # fmt: skip
    """Decode five planes of `width` weights; with `ONE_SCALE` each plane lies within one group."""
    j = tl.arange(0, 32)[None, :]
    mask_b = (n < N) & (j < width)
    byte = tl.load(packed_ptr + n * stride_pn + (block * 32 + j) * stride_pb, mask=mask_b, other=0)
    for digit in tl.static_range(5):
        k = block * 160 + width * digit + j
        mask = mask_b & (k < K)
        if ONE_SCALE:
            group, some = (block * 160 + 32 * digit) // GROUP, n < N
        else:
            group, some = k // GROUP, mask
        scale = load_scale(
            exponent_ptr, fraction_ptr, n, group, some,
            stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
        )  # fmt: skip
        trit = digit_of(byte, digit).to(tl.float32)
        offset = n * stride_an + k * stride_ak
        digits = add_remainder(trit, remainder_ptr, offset, mask, of_trit, of_low, DIGITS, NIBBLE)
        weight = round_weight(digits * scale, DIGITS)
        tl.store(weight_ptr + n * stride_wn + k, weight.to(weight_ptr.dtype.element_ty), mask=mask)


def decode_digits_triton(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode weights that are all digits with the Triton kernel."""
    rows, in_features = packed.out_features, packed.in_features
    weight = torch.empty(rows, in_features, dtype=dtype, device=packed.trits.device)
    if weight.numel():
        blocks = triton.cdiv(in_features, BLOCK)
        _decode_digits_kernel[(triton.cdiv(rows, ROWS) * blocks,)](
            *packed.all_pointers, weight, rows, in_features, blocks,
            *packed.all_strides, *packed.worths, weight.stride(0),
            **packed.all_constants, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return weight


def with_remainders(packed: Packed, generator: torch.Generator) -> Iterator[tuple[str, Packed]]:
    """Add remainders of any int8 value to a packed matrix, whose weights are then all digits.

    Yields:
        A label and the matrix: with remainders of eight bits, then of four.
    """
    shape = (packed.out_features, packed.in_features)
    draw = partial(torch.randint, generator=generator, device=generator.device, dtype=torch.int8)
    for radix, bits in ((64, 8), (14, 4)):
        low = draw(-128, 128, shape).to(packed.trits.device)
        digits = packed._replace(remainder=low, radix=radix, nibble=bits == 4)
        yield f"all digits of {bits} bits", digits


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, in_features in ((1, 1), (3, 33), (33, 123), (2, 165), (9, 1000)):
        packed = random_packed(rows, in_features, group_size, generator, spread=90).to(device)
        for name, all_digits in with_remainders(packed, generator):
            yield Case(f"{rows}x{in_features} {name}", (all_digits,))
    packed = all_digits
    yield Case("9x1000 whole octaves", (packed._replace(fraction=None),))
    yield Case("5x1000 strided", (packed.rows(slice(None, None, 2)),))
    yield Case("9x1000 five sixteenths of the remainder", (packed._replace(radix=246, low=5),))
    packed = packed._replace(radix=1024, low=13, nibble=False)
    yield Case("9x1000 thirteen sixteenths of eight bits", (packed,))
    assert packed.remainder is not None
    apart = torch.stack([packed.remainder, packed.remainder], dim=2)[:, :, 0]
    yield Case("9x1000 remainder strided", (packed._replace(remainder=apart),))


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    packed = random_packed(8192, 8192, group_size, generator)
    for name, all_digits in with_remainders(packed, generator):
        yield Timing(f"8192x8192 {name}", (all_digits,), run=decode_digits_triton)


def in_float32(run: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Wrap an implementation with `dtype` fixed to float32."""

    @wraps(run)
    def as_float32(*inputs: P.args, **named: P.kwargs) -> Tensor:
        named["dtype"] = torch.float32
        return run(*inputs, **named)

    return as_float32


def digits_large(packed: Packed) -> Tensor:
    """Compute the digits of a matrix that is too large for the reference."""
    return digits_torch(packed, torch.float32)


def decode_large(packed: Packed) -> Tensor:
    """Decode a matrix that is too large for the reference, to float32."""
    return decode_digits_torch(packed, torch.float32)


def in_rounded_float32(decode: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Wrap an implementation to decode to float32, rounded to bf16 for the comparison.

    Triton's interpreter rounds bf16 wrongly; float32 holds the same values.
    """
    decode = in_float32(decode)

    @wraps(decode)
    def run(*inputs: P.args, **named: P.kwargs) -> Tensor:
        weight = decode(*inputs, **named)
        rounded = weight.to(torch.bfloat16)
        # a value that is not exact in bf16 becomes NaN, which fails every comparison
        return torch.where(rounded.float() == weight, rounded, torch.nan)

    return run


DECODE_DIGITS = Operation(
    "decode_digits", in_rounded_float32(decode_digits_triton),
    in_rounded_float32(decode_digits_torch), decode_digits_reference, _cases,
    arguments={"packed": Matrix(spread=90, digits="all")}, scale_path=in_planes, timings=_timings,
    native=in_rounded_float32(decode_digits_native),
)  # fmt: skip

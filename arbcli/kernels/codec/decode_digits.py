"""Decode `int8` weights, z = T * P + A: w[n, k] = bf16(z[n, k] / U * scale).

The unit U is P, or the next power of two. z has nine bits with an int8 remainder and at most six
with one of four bits, and the scale eight, so that z / U * scale is exact in float32 and rounded
once, to bf16. All kernels, backends and references compute the same weight.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import BLOCK
from arbcli.kernels.codec.packed import ROOTS, Packed, load_scale, scales_torch
from arbcli.kernels.codec.packing import (
    first_digit,
    has_planes,
    take_trit,
    unpack_trits,
    unpack_trits_torch,
)
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL
from arbcli.kernels.runtime.backend import backend_of
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.ptx import HAS_PTX

ROWS, ABREAST, NUM_WARPS = 4, 8, 4
"""Rows per program, blocks of each, and warps."""
REST_ROWS = 8
"""Rows per program of blocks that are short or whose planes have several scales, one of each."""


def digits_torch(packed: Packed, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """Compute T, or z / U of int8 weights, exactly in float32: (N, K) of `dtype`.

    The result is exact in bfloat16 too, unless the weights of the two digits are fading.

    Args:
        packed: the matrix.
        dtype: float32 or bfloat16.
        rows: slice of rows; None for all.
    """
    packed = packed if rows is None else packed.rows(rows)
    trits = unpack_trits_torch(packed.trits, packed.in_features, dtype)
    if packed.remainder is None:
        return trits
    low = packed.remainder << 4 >> 4 if packed.nibble else packed.remainder
    return trits.mul_(packed.radix).add_(low.to(dtype), alpha=packed.low).mul_(1 / packed.unit)


def integers(packed: Packed) -> Tensor:
    """Return the integers of weights, (N, K) int8: trits, or z if they are all digits."""
    if packed.remainder is None:
        return unpack_trits(packed.trits, packed.in_features)
    return (digits_torch(packed, torch.float32) * packed.unit).to(torch.int8)


def decode_digits_torch(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode a matrix of trits or of int8 weights, with one multiplication per weight."""
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
    """Decode a matrix with the native loop if the device has it, otherwise with torch.

    Returns:
        (N, K) of `dtype`.

    Raises:
        ValueError: shapes or dtypes of the matrix do not match, or `dtype` is neither bfloat16 nor
            float32.
    """
    DECODE_DIGITS.check(packed, dtype)
    run = decode_digits_native if backend_of(packed.trits) == "native" else decode_digits_torch
    return run(packed, dtype)


@triton.jit
def add_remainder(
    trit, remainder_ptr, offset, mask, trit_unit, low_unit, INT8: tl.constexpr, NIBBLE: tl.constexpr
):
    """Convert trits to float32 z / U if `INT8`; `offset` is the index of each weight's remainder.

    A trit is worth `trit_unit` in units of the scale, and a unit of the remainder `low_unit`.
    """
    if INT8:
        low = tl.load(remainder_ptr + offset, mask=mask, other=0)
        trit = add_low(trit, low, trit_unit, low_unit, NIBBLE)
    return trit


@triton.jit
def add_low(trit, low, trit_unit, low_unit, NIBBLE: tl.constexpr):
    """Compute float32 z / U from float32 trits and int8 remainders: see `add_remainder`."""
    low = low.to(tl.int32)
    if NIBBLE:
        low = (low << 28) >> 28
    return trit * trit_unit + low.to(tl.float32) * low_unit


@triton.jit
def round_weight(weight, INT8: tl.constexpr):
    """Round float32 weights to bf16, to nearest even; weights of trits are exact in bf16."""
    if INT8:
        bits = weight.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        weight = rounded.to(tl.float32, bitcast=True)
    return weight


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Round float32 of magnitude below 448 to the bits of e4m3, ties to even."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    nearest = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # below 2**-6 the sum's last bits count multiples of 2**-9
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (sign | tl.where(bits < 0x3C800000, small, nearest - (120 << 3))).to(tl.uint8)


@triton.jit
def from_e4m3(codes, NATIVE: tl.constexpr):
    """Convert the bits of e4m3 to float32, exactly."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = codes.to(tl.int32)
    # as exponent and mantissa of a float32, e4m3 bits are 2**120 too small
    small = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    return small * 1.329227995784916e36  # 2**120


@triton.jit
def _decode_digits_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
    N, K, blocks,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr, NIBBLE: tl.constexpr,
    ROWS: tl.constexpr, ABREAST: tl.constexpr, REST_ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    decode_tile(
        packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr, N, K, blocks,
        stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
        stride_an, stride_ak, trit_unit, low_unit, stride_wn, 1, 1.0,
        GROUP, HAS_FRACTION, INT8, NIBBLE, ROWS, ABREAST, REST_ROWS, PTX, False, False,
    )  # fmt: skip


@triton.jit
def decode_tile(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
    N, K, blocks,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_wn, stride_wk, factor,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr, NIBBLE: tl.constexpr,
    ROWS: tl.constexpr, ABREAST: tl.constexpr, REST_ROWS: tl.constexpr, PTX: tl.constexpr,
    E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Decode `ABREAST` of the first `blocks` blocks of `ROWS` rows, or one of the others.

    With `E4M3` weights are stored as the bits of e4m3 of w * factor.
    """
    program = tl.program_id(0)
    others = tl.cdiv(K, 160) - blocks
    rest_programs = tl.cdiv(N, REST_ROWS) * others
    if program < rest_programs:
        rest_n = (program // others).to(tl.int64) * REST_ROWS + tl.arange(0, REST_ROWS)
        other = blocks + program % others + tl.arange(0, 1)
        width = tl.minimum((K - other * 160 + 4) // 5, 32)[None, :, None]
        _decode_planes(
            packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
            rest_n, other, width, N, K, K,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
            stride_an, stride_ak, trit_unit, low_unit, stride_wn, stride_wk, factor,
            GROUP, HAS_FRACTION, INT8, NIBBLE, False, PTX, E4M3, NATIVE,
        )  # fmt: skip
    else:  # offsets known to the compiler, so that loads are vectorised
        program -= rest_programs
        tiles = tl.cdiv(blocks, ABREAST)
        n = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        block = program % tiles * ABREAST + tl.arange(0, ABREAST)
        _decode_planes(
            packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
            n, block, 32, N, K, 160 * blocks,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
            stride_an, stride_ak, trit_unit, low_unit, stride_wn, stride_wk, factor,
            GROUP, HAS_FRACTION, INT8, NIBBLE, True, PTX, E4M3, NATIVE,
        )  # fmt: skip


@triton.jit
def _decode_planes(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
    n, block, width, N, K, end,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_wn, stride_wk, factor,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr,
    INT8: tl.constexpr, NIBBLE: tl.constexpr, ONE_SCALE: tl.constexpr, PTX: tl.constexpr,
    E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Decode five planes of `width` weights of blocks of rows, in columns before `end`.

    With `ONE_SCALE` each plane lies within one group. Tensors are [rows, blocks, 32]. All is
    loaded before any weight is stored, as the compiler moves no load before a store.
    """
    n, block, j = n[:, None, None], block[None, :, None], tl.arange(0, 32)[None, None, :]
    known = (n < N) & (block * 160 < end)
    mask_b = known & (j < width)
    byte = tl.load(packed_ptr + n * stride_pn + (block * 32 + j) * stride_pb, mask=mask_b, other=0)
    lows, scales = (), ()
    for digit in tl.static_range(5):
        k = block * 160 + width * digit + j
        mask = mask_b & (k < K)
        low = byte
        if INT8:
            low = tl.load(remainder_ptr + n * stride_an + k * stride_ak, mask=mask, other=0)
        lows = lows + (low,)  # noqa: RUF005 (triton knows no star)
        if ONE_SCALE:
            group, some = (5 * block + digit) // (GROUP // 32), known
        else:
            group, some = k // GROUP, mask
        scale = load_scale(
            exponent_ptr, fraction_ptr, n, group, some,
            stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
        )  # fmt: skip
        scales = scales + (scale,)  # noqa: RUF005
    # the trits of each byte, from the last digit on
    left = first_digit(byte)
    dtype = weight_ptr.dtype.element_ty
    for digit in tl.static_range(4, -1, -1):
        double, left = take_trit(left, digit)  # 2 T or -2 T
        if INT8:
            half_unit = trit_unit * (0.5 if digit % 2 else -0.5)
            z = add_low(double, lows[digit], half_unit, low_unit, NIBBLE)
        else:
            z = double * (0.5 if digit % 2 else -0.5)
        weight = z * scales[digit]
        if not (PTX and dtype == tl.bfloat16):  # which a GPU rounds as it converts
            weight = round_weight(weight, INT8)
        k = block * 160 + width * digit + j
        column = k
        if E4M3:  # may be transposed, so that columns are far apart
            column = k.to(tl.int64) * stride_wk
            weight = to_e4m3(weight * factor, NATIVE)
        weight_ptrs = weight_ptr + n * stride_wn + column
        tl.store(weight_ptrs, weight.to(dtype), mask=mask_b & (k < K))


def tile_grid(packed: Packed, rows: int, abreast: int, rest_rows: int) -> tuple[int, int]:
    """Count the blocks whose planes have one scale each, and the programs of `decode_tile`."""
    blocks = packed.in_features // BLOCK if has_planes(packed.group_size) else 0
    others = triton.cdiv(packed.in_features, BLOCK) - blocks
    programs = triton.cdiv(packed.out_features, rest_rows) * others
    return blocks, programs + triton.cdiv(packed.out_features, rows) * triton.cdiv(blocks, abreast)


def decode_digits_triton(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode int8 weights with the Triton kernel."""
    rows, in_features = packed.out_features, packed.in_features
    weight = torch.empty(rows, in_features, dtype=dtype, device=packed.trits.device)
    if weight.numel():
        blocks, programs = tile_grid(packed, ROWS, ABREAST, REST_ROWS)
        _decode_digits_kernel[(programs,)](
            *packed.all_pointers, weight, rows, in_features, blocks,
            *packed.all_strides, *packed.worths, weight.stride(0),
            **packed.all_constants, ROWS=ROWS, ABREAST=ABREAST, REST_ROWS=REST_ROWS, PTX=HAS_PTX,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return weight


DECODE_DIGITS = Operation(
    "decode_digits", decode_digits_triton, decode_digits_torch,
    "packed: packed[N, K]; dtype",
    native=decode_digits_native, where=(DTYPE_IS_REAL,),
)  # fmt: skip

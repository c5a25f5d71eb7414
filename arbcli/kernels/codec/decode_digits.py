"""Decode `int8` weights, z = T * P + A: w[n, k] = bf16(z[n, k] / U * scale).

The unit U is P, or the next power of two. z has nine bits with an int8 remainder and at most six
with one of four bits, and the scale eight, so that z / U * scale is exact in float32 and rounded
once, to bf16. All kernels, backends and references compute the same weight.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import BLOCK
from arbcli.kernels.codec.packed import ROOTS, Packed, load_scale, scales_torch
from arbcli.kernels.codec.packing import digit_of, unpack_trits_torch
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import Matrix
from arbcli.kernels.runtime.backend import uses_native
from arbcli.kernels.runtime.operation import Operation

ROWS = 32
"""Rows per program, one block of each."""


def digits_torch(packed: Packed, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """Compute T, or z / U of int8 weights, exactly in float32.

    The result is exact in bfloat16 too, unless the weights of the two digits are fading.
    """
    packed = packed if rows is None else packed.rows(rows)
    trits = unpack_trits_torch(packed.trits, packed.in_features, dtype)
    if packed.remainder is None:
        return trits
    low = packed.remainder << 4 >> 4 if packed.nibble else packed.remainder
    return trits.mul_(packed.radix).add_(low.to(dtype), alpha=packed.low).mul_(1 / packed.unit)


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
    trit,
    remainder_ptr,
    offset,
    mask,
    trit_unit,
    low_unit,
    INT8: tl.constexpr,
    NIBBLE: tl.constexpr,
):
    """Convert trits to float32 z / U if `INT8`; `offset` is the index of each weight's remainder.

    A trit is worth `trit_unit` in units of the scale, and a unit of the remainder `low_unit`.
    """
    if INT8:
        low = tl.load(remainder_ptr + offset, mask=mask, other=0).to(tl.int32)
        if NIBBLE:
            low = (low << 28) >> 28
        trit = trit * trit_unit + low.to(tl.float32) * low_unit
    return trit


@triton.jit
def round_weight(weight, INT8: tl.constexpr):
    """Round float32 weights to bf16, to nearest even; weights of trits are exact in bf16."""
    if INT8:
        bits = weight.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        weight = rounded.to(tl.float32, bitcast=True)
    return weight


@triton.jit
def _decode_digits_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
    N, K, blocks,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr,
    INT8: tl.constexpr, NIBBLE: tl.constexpr, ROWS: tl.constexpr,
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
            stride_an, stride_ak, trit_unit, low_unit, stride_wn,
            GROUP, HAS_FRACTION, INT8, NIBBLE, GROUP % 32 == 0,
        )  # fmt: skip
    else:
        _decode_planes(
            packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
            n, block, width, N, K,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
            stride_an, stride_ak, trit_unit, low_unit, stride_wn,
            GROUP, HAS_FRACTION, INT8, NIBBLE, False,
        )  # fmt: skip


@triton.jit
def _decode_planes(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, weight_ptr,
    n, block, width, N, K,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr,
    INT8: tl.constexpr, NIBBLE: tl.constexpr, ONE_SCALE: tl.constexpr,
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
        z = add_remainder(trit, remainder_ptr, offset, mask, trit_unit, low_unit, INT8, NIBBLE)
        weight = round_weight(z * scale, INT8)
        tl.store(weight_ptr + n * stride_wn + k, weight.to(weight_ptr.dtype.element_ty), mask=mask)


def decode_digits_triton(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode int8 weights with the Triton kernel."""
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


DECODE_DIGITS = Operation(
    "decode_digits", decode_digits_triton, decode_digits_torch, {"packed": Matrix()},
    native=decode_digits_native,
)  # fmt: skip

"""Decode packed trits and scales to weights: w[n, k] = bf16(T[n, k] * 2 ** (v[n, g] / 128)).

v = 128 E + F is the fixed-point log2 of the scale of group g = k // G: E the octave, F the
fraction. The rounded bf16 value is the weight, in every kernel, backend and reference. It is made
from integers: E is the exponent field of a float, F one of 128 mantissas, all at least 0.005 of a
bf16 step away from a rounding boundary, so no implementation of exp2 can land on another one.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels._triton import tl, triton
from arbcli.kernels.backend import uses_triton
from arbcli.kernels.packing import (
    BLOCK,
    LARGEST_BYTE,
    check_packed,
    first_digit,
    plane_offsets,
    row_bytes,
    take_trit,
    unpack_trits_reference,
    unpack_trits_torch,
)
from arbcli.kernels.spec import Case, KernelSpec, Timing

OCTAVE = 128
"""Steps of v in a doubling of the scale."""
LOWEST_EXPONENT, HIGHEST_EXPONENT = -96, 31
"""v saturates with E in this range."""


def decode_weight_reference(
    packed: Tensor, exponent: Tensor, fraction: Tensor | None, in_features: int, group_size: int
) -> Tensor:
    """Compute what `decode_weight` must return, in float64 until the one rounding to bf16."""
    trits = unpack_trits_reference(packed, in_features).to(torch.float64)
    v = exponent.to(torch.float64) * OCTAVE
    if fraction is not None:
        v = v + fraction.to(torch.float64)
    scale = torch.exp2(v / OCTAVE).repeat_interleave(group_size, dim=1)[:, :in_features]
    return (trits * scale).to(torch.bfloat16)


def scales_torch(exponent: Tensor, fraction: Tensor | None) -> Tensor:
    """Build (N, groups) float32 scales, each exactly representable in bf16, from E and F."""
    bits = (exponent.to(torch.int32) + 127) << 23
    if fraction is not None:
        mantissa = torch.floor(torch.exp2(fraction.to(torch.float32) / OCTAVE) * 128 - 127.5)
        bits += mantissa.to(torch.int32) << 16
    return bits.view(torch.float32)


def decode_weight_torch(
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Decode a whole matrix with a table lookup and one product a weight."""
    weight = unpack_trits_torch(packed, in_features, dtype)
    scale = scales_torch(exponent, fraction).to(dtype)[..., None]
    whole = in_features // group_size
    full = weight[:, : whole * group_size].unflatten(1, (whole, group_size))
    full *= scale[:, :whole]
    if whole * group_size < in_features:
        weight[:, whole * group_size :] *= scale[:, whole]
    return weight


@triton.jit
def scale_of(exponent, fraction):
    """Build float32 scales 2**E * bf16(2**(F / 128)) from int8 digits inside a kernel."""
    power = ((fraction.to(tl.int32) << 16) + 0x3F800000).to(tl.float32, bitcast=True)  # 1 + F / 128
    rounded = (tl.exp2(power).to(tl.int32, bitcast=True) + 0x8000) & -0x10000  # to bf16
    return (rounded + ((exponent.to(tl.int32) - 1) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(
    exponent_ptr, fraction_ptr, offs_n, offs_g, mask,
    stride_en, stride_eg, stride_fn, stride_fg,
    HAS_FRACTION: tl.constexpr,
):  # fmt: skip
    """Load the digits of scales and build them; `offs_n` and `offs_g` broadcast."""
    offset = offs_n * stride_en + offs_g * stride_eg
    exponent = tl.load(exponent_ptr + offset, mask=mask, other=0)
    if HAS_FRACTION:
        offset = offs_n * stride_fn + offs_g * stride_fg
        fraction = tl.load(fraction_ptr + offset, mask=mask, other=0)
    else:
        fraction = tl.zeros_like(exponent)
    return scale_of(exponent, fraction)


@triton.jit
def scaled(double, scale, digit: tl.constexpr):
    """Multiply what `take_trit` returned by scales, exactly; a weight of 0 is never -0."""
    return double * (scale * (0.5 if digit % 2 else -0.5)) + 0.0


@triton.jit
def _decode_weight_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, weight_ptr,
    N, K,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_wn, stride_wk,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Decode up to `BLOCKS` blocks of some rows; the programs of a row follow each other."""
    blocks = tl.cdiv(K, 160)
    tiles = tl.cdiv(blocks, BLOCKS)
    first = tl.program_id(0) % tiles * BLOCKS
    n = (tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None, None]
    packed_ptrs, weight_ptrs = packed_ptr + n * stride_pn, weight_ptr + n * stride_wn
    exponent_ptrs, fraction_ptrs = exponent_ptr + n * stride_en, fraction_ptr + n * stride_fn
    if (GROUP % 32 == 0) & ((first + BLOCKS) * 160 <= K):
        _decode_blocks(
            packed_ptrs, exponent_ptrs, fraction_ptrs, weight_ptrs, n < N,
            (first + tl.arange(0, BLOCKS))[None, :, None], K,
            stride_pb, stride_eg, stride_fg, stride_wk, GROUP, HAS_FRACTION, True,
        )  # fmt: skip
    else:
        for i in range(first, tl.minimum(first + BLOCKS, blocks)):
            _decode_blocks(
                packed_ptrs, exponent_ptrs, fraction_ptrs, weight_ptrs, n < N,
                i + tl.zeros((1, 1, 1), tl.int32), K,
                stride_pb, stride_eg, stride_fg, stride_wk, GROUP, HAS_FRACTION, False,
            )  # fmt: skip


@triton.jit
def _decode_blocks(
    packed_ptrs, exponent_ptrs, fraction_ptrs, weight_ptrs, mask_n, block, K,
    stride_pb, stride_eg, stride_fg, stride_wk,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Decode blocks of rows; with `PLANES` they are full, and each plane lies within one group."""
    offs_b = 32 * block + tl.arange(0, 32)[None, None, :]
    mask = mask_n if PLANES else mask_n & (plane_offsets(offs_b, K, 0) < K)
    byte = tl.load(packed_ptrs + offs_b * stride_pb, mask=mask, other=0)
    left = first_digit(byte)  # [rows, blocks, 32]
    for digit in tl.static_range(4, -1, -1):
        if PLANES:
            plane = 160 * block + 32 * digit
            k, group = plane + tl.arange(0, 32)[None, None, :], plane // GROUP
        else:
            k = plane_offsets(offs_b, K, digit)
            mask, group = mask_n & (k < K), k // GROUP
        scale = load_scale(
            exponent_ptrs, fraction_ptrs, 0, group, mask, 0, stride_eg, 0, stride_fg, HAS_FRACTION
        )
        double, left = take_trit(left, digit)
        weight = scaled(double, scale, digit).to(weight_ptrs.dtype.element_ty)
        tl.store(weight_ptrs + k * stride_wk, weight, mask=mask)


def _decode_weight_triton(
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    rows = packed.shape[0]
    weight = torch.empty(rows, in_features, dtype=dtype, device=packed.device)
    if weight.numel():
        digits = exponent if fraction is None else fraction
        block_n, blocks = 2, 4
        tiles = triton.cdiv(in_features, BLOCK * blocks)
        _decode_weight_kernel[(triton.cdiv(rows, block_n) * tiles,)](
            packed, exponent, digits, weight, rows, in_features,
            *packed.stride(), *exponent.stride(), *digits.stride(), *weight.stride(),
            GROUP=group_size, HAS_FRACTION=fraction is not None, BLOCK_N=block_n, BLOCKS=blocks,
            num_warps=1,
        )  # fmt: skip
    return weight


def decode_weight(
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Decode a packed matrix to its weights.

    Args:
        packed: (N, row_bytes(K)) uint8.
        exponent: (N, ceil(K / G)) int8, E in -96..31.
        fraction: (N, ceil(K / G)) int8, F in 0..127; None stands for zeros.
        in_features: K.
        group_size: G.
        dtype: bfloat16, or float32, which holds the same bf16 values.

    Returns:
        (N, K) in `dtype`; exact, and equal to the last bit on every backend.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    check_packed(packed, in_features)
    check_scales(packed, exponent, fraction, in_features, group_size)
    run = _decode_weight_triton if uses_triton(packed) else decode_weight_torch
    return run(packed, exponent, fraction, in_features, group_size, dtype)


def check_scales(
    packed: Tensor, exponent: Tensor, fraction: Tensor | None, in_features: int, group_size: int
) -> None:
    """Raise ValueError unless the scales' digits fit the packed rows."""
    shape = (packed.shape[0], num_groups(in_features, group_size))
    for digits in (exponent,) if fraction is None else (exponent, fraction):
        if digits.dtype != torch.int8 or tuple(digits.shape) != shape:
            got = f"{digits.dtype} {tuple(digits.shape)}"
            raise ValueError(f"need int8 scales of shape {shape}, got {got}")


def num_groups(in_features: int, group_size: int) -> int:
    """Count the groups of a row of `in_features` weights; the last may be short."""
    return -(-in_features // group_size)


def random_packed(
    rows: int, in_features: int, group_size: int, generator: torch.Generator, spread: int = 127
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw packed trits, E and F where the generator is; E is within `spread` of -1."""
    draw = partial(torch.randint, generator=generator, device=generator.device)
    packed = draw(0, LARGEST_BYTE + 1, (rows, row_bytes(in_features)), dtype=torch.uint8)
    shape = (rows, num_groups(in_features, group_size))
    low, high = max(LOWEST_EXPONENT, -1 - spread), min(HIGHEST_EXPONENT, spread - 1)
    exponent = draw(low, high + 1, shape, dtype=torch.int8)
    return packed, exponent, draw(0, OCTAVE, shape, dtype=torch.int8)


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, in_features in ((1, 1), (3, 33), (33, 123), (2, 165), (2, 1311)):
        state = [t.to(device) for t in random_packed(rows, in_features, group_size, generator)]
        yield Case(f"{rows}x{in_features}", (*state, in_features, group_size))
    packed, exponent, _ = state
    yield Case("2x1311 whole octaves", (packed, exponent, None, 1311, group_size))
    state = [t.to(device)[1::2] for t in random_packed(6, 165, group_size, generator)]
    yield Case("3x165 strided", (*state, 165, group_size))
    packed, exponent, fraction = state
    apart = torch.stack([fraction, fraction], dim=2)[:, :, 0]
    yield Case("3x165 fraction strided", (packed, exponent, apart, 165, group_size))
    zeros = torch.full_like(packed, LARGEST_BYTE // 2)
    yield Case("3x165 zeros", (zeros, exponent, fraction, 165, group_size))


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    for rows, in_features in ((8192, 8192), (2048, 5632)):
        state = random_packed(rows, in_features, group_size, torch.Generator(device))
        label, inputs = f"{rows}x{in_features}", (*state, in_features, group_size)
        yield Timing(label, inputs, run=_decode_weight_triton)


def decode_weight_f32(decode):
    """Wrap an implementation so that it decodes to float32, rounded to bf16 for the comparison.

    Triton's interpreter rounds bf16 wrongly; float32 holds the same values.
    """

    def run(*inputs):
        weight = decode(*inputs, dtype=torch.float32)
        rounded = weight.to(torch.bfloat16)
        # a value that bf16 cannot hold is an error, and NaN equals nothing
        return torch.where(rounded.float() == weight, rounded, torch.nan)

    return run


DECODE_WEIGHT = KernelSpec(
    "decode_weight",
    decode_weight_f32(_decode_weight_triton),
    decode_weight_f32(decode_weight_torch),
    decode_weight_reference,
    _cases,
    uses_scales=True,
    timings=_timings,
)

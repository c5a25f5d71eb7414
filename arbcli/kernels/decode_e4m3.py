"""Decode packed trits and scales to e4m3, for products in eight bits: w ~ q * scale.

The largest octave of a matrix comes to 2**7, as in `quantise_rows`. A scale is rounded to three
bits behind the leading one, at most 6 % off, the same way in forward and backward; what a step
changes are still the exact digits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels._triton import tl, triton
from arbcli.kernels.backend import uses_triton
from arbcli.kernels.decode_weight import (
    check_scales,
    decode_weight_reference,
    decode_weight_torch,
    load_scale,
    random_packed,
)
from arbcli.kernels.packing import (
    byte_tiles,
    check_packed,
    first_digit,
    plane_offsets,
    take_trit,
)
from arbcli.kernels.quantise_rows import (
    E4M3,
    LARGEST_OCTAVE,
    in_float32,
    round_e4m3_reference,
    to_e4m3,
)
from arbcli.kernels.spec import MATRIX, Case, KernelSpec, Timing


def decode_e4m3_reference(
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Compute what `decode_e4m3` must return; q is float32 here."""
    weight = decode_weight_reference(packed, exponent, fraction, in_features, group_size).double()
    weight = weight.T if transposed else weight
    octave = exponent.max().double() - LARGEST_OCTAVE
    scale = torch.exp2(octave).expand(1, len(weight)).to(torch.float32)
    return round_e4m3_reference(weight * torch.exp2(-octave)), scale


def _decode_e4m3_torch(packed, exponent, fraction, in_features, group_size, transposed):
    octave = exponent.amax().to(torch.int32) - LARGEST_OCTAVE
    inverse, scale = (((127 + sign * octave) << 23).view(torch.float32) for sign in (-1, 1))
    state = (packed, exponent, fraction, in_features, group_size)
    q = (decode_weight_torch(*state, torch.float32) * inverse).to(E4M3)
    q = q.T.contiguous() if transposed else q
    return q, scale.repeat(1, len(q))


@triton.jit
def _times(trit, bits, digit: tl.constexpr):
    """Multiply the bits of positive e4m3 numbers by the signs of what `take_trit` returned."""
    sign = (trit.to(tl.int32, bitcast=True) >> 24) & 0x80
    if digit % 2 == 0:
        sign ^= 0x80
    return tl.where(trit == 0, 0, bits.to(tl.int32) | sign).to(tl.uint8)


@triton.jit
def _decode_e4m3_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, largest_ptr, q_ptr, scale_ptr,
    N, K, row_bytes,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_qn, stride_qk,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode a block of columns.

    Scales are rounded by integers: they are few, and triton 3.6 converted a column of them wrongly.
    """
    block = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_n = rows.to(tl.int64)[:, None]
    offs_j = tl.arange(0, 32)[None, :]
    offs_b = block * 32 + offs_j
    mask_n = offs_n < N
    octave = tl.load(largest_ptr).to(tl.int32) - 7
    inverse = ((127 - octave) << 23).to(tl.float32, bitcast=True)
    scale = ((127 + octave) << 23).to(tl.float32, bitcast=True)
    byte = tl.load(  # [BLOCK_N, 32] uint8
        packed_ptr + offs_n * stride_pn + offs_b * stride_pb,
        mask=mask_n & (offs_b < row_bytes), other=0,
    )  # fmt: skip
    left = first_digit(byte)
    q_ptrs = q_ptr + offs_n * stride_qn
    by_plane = (GROUP % 32 == 0) & (block * 160 + 160 <= K)
    for digit in tl.static_range(4, -1, -1):
        trit, left = take_trit(left, digit)
        if by_plane:
            first = block * 160 + digit * 32
            of_plane = load_scale(  # [BLOCK_N, 1]
                exponent_ptr, fraction_ptr, offs_n, first // GROUP, mask_n,
                stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
            )  # fmt: skip
            k = first + offs_j
            q = _times(trit, to_e4m3(of_plane * inverse, False), digit)
            tl.store(q_ptrs + k.to(tl.int64) * stride_qk, q, mask=mask_n)
        else:
            k = plane_offsets(offs_b, K, digit)
            mask = mask_n & (k < K)
            of_group = load_scale(  # [BLOCK_N, 32]
                exponent_ptr, fraction_ptr, offs_n, k // GROUP, mask,
                stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
            )  # fmt: skip
            q = _times(trit, to_e4m3(of_group * inverse, False), digit)
            tl.store(q_ptrs + k.to(tl.int64) * stride_qk, q, mask=mask)
        if TRANSPOSED and tl.program_id(0) == 0:
            tl.store(scale_ptr + k, tl.zeros_like(k).to(tl.float32) + scale, mask=k < K)
    if not TRANSPOSED and block == 0:
        tl.store(scale_ptr + rows, tl.zeros_like(rows).to(tl.float32) + scale, mask=rows < N)


def _decode_e4m3_triton(packed, exponent, fraction, in_features, group_size, transposed):
    rows, num_bytes = packed.shape
    shape = (in_features, rows) if transposed else (rows, in_features)
    q = torch.empty(shape, dtype=E4M3, device=packed.device)
    scale = torch.empty(1, len(q), device=packed.device)
    digits = exponent if fraction is None else fraction
    strides = q.stride()[::-1] if transposed else q.stride()
    block_n, warps = (32, 4) if transposed else (8, 1)
    _decode_e4m3_kernel[byte_tiles(rows, num_bytes, block_n)](
        packed, exponent, digits, exponent.amax(), q.view(torch.uint8), scale,
        rows, in_features, num_bytes,
        *packed.stride(), *exponent.stride(), *digits.stride(), *strides,
        GROUP=group_size, HAS_FRACTION=fraction is not None, TRANSPOSED=transposed,
        BLOCK_N=block_n, num_warps=warps,
    )  # fmt: skip
    return q, scale


def decode_e4m3(
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode a packed matrix to e4m3.

    Args:
        packed: (N, row_bytes(K)) uint8, not empty.
        exponent: (N, ceil(K / G)) int8, E in -96..31.
        fraction: (N, ceil(K / G)) int8, F in 0..127; None stands for zeros.
        in_features: K.
        group_size: G.
        transposed: whether to decode w.T.

    Returns:
        (N, K) float8_e4m3fn q, or (K, N), contiguous; and its scale, a power of two, once for every
        row of q: (1, N) or (1, K) float32, as a product of matrices wants it.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    check_packed(packed, in_features)
    check_scales(packed, exponent, fraction, in_features, group_size)
    run = _decode_e4m3_triton if uses_triton(packed) else _decode_e4m3_torch
    return run(packed, exponent, fraction, in_features, group_size, transposed)


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, in_features in ((1, 1), (3, 33), (65, 43), (2, 165), (4, 1311)):
        state = random_packed(rows, in_features, group_size, generator, spread=9)
        state = [digits.to(device) for digits in state]
        for transposed in (False, True):
            label = f"{rows}x{in_features}{' transposed' * transposed}"
            yield Case(label, (*state, in_features, group_size, transposed))
    packed, exponent, fraction = (digits[::2] for digits in state)
    yield Case("2x1311 strided", (packed, exponent, fraction, 1311, group_size, True))
    yield Case("whole octaves", (packed, exponent, None, 1311, group_size, False))
    for end in (-96, 31):
        yield Case(
            f"E = {end}",
            (packed, torch.full_like(exponent, end), fraction, 1311, group_size, False),
        )


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    state = random_packed(*MATRIX, group_size, torch.Generator(device), spread=8)
    for transposed in (False, True):
        inputs = (*state, MATRIX[1], group_size, transposed)
        yield Timing(f"11264x2048{' transposed' * transposed}", inputs, run=_decode_e4m3_triton)


DECODE_E4M3 = KernelSpec(
    "decode_e4m3",
    in_float32(_decode_e4m3_triton),
    in_float32(_decode_e4m3_torch),
    decode_e4m3_reference,
    _cases,
    uses_scales=True,
    timings=_timings,
)

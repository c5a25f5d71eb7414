"""Encode z = P T + A as its last four bits, relative to the z of the step before.

`last_bits`: b = z mod 16, of two rows in a byte, the even row in the low half. `take_last_bits_`:

    z <- z + ((b - z + 8) mod 16) - 8,  T = sign(z) where |z| > P / 2, else 0,  A = z - P T

The result is the encoded z if that is within -8..7 of the previous one. Four bits are less than a
trit with its remainder of eight, and no less exact.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packing import (
    digit_of,
    pack_trits_torch,
    place,
    plane_offsets,
    unpack_trits_torch,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT8, UINT8, Array, Number
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation

LARGEST_CHANGE = 7
"""Largest change of z, in either direction, that four bits encode."""


def _last_bits_torch(
    trits: Tensor, remainder: Tensor, radix: int, nibble: bool, out: Tensor | None = None
) -> Tensor:
    rows, columns = remainder.shape
    if out is None:
        out = torch.empty((rows + 1) // 2, columns, dtype=torch.uint8, device=trits.device)
    for some in row_chunks(remainder):
        z = _z_torch(trits[some], remainder[some], radix, nibble).bitwise_and_(15).to(torch.uint8)
        pairs = out[some.start // 2 : (some.stop + 1) // 2]
        pairs.copy_(z[::2])
        pairs[: len(z) // 2].bitwise_or_(z[1::2] << 4)
    return out


def _take_last_bits_torch(
    trits: Tensor, remainder: Tensor, bits: Tensor, radix: int, nibble: bool
) -> None:
    half = radix // 2
    for some in row_chunks(remainder):
        state = remainder[some]
        z = _z_torch(trits[some], state, radix, nibble)
        low_bits = bits[some.start // 2 : (some.stop + 1) // 2].to(torch.int16)
        z[::2] += (low_bits - z[::2] + 8).bitwise_and_(15) - 8
        odd = z[1::2]
        odd += ((low_bits[: len(odd)] >> 4) - odd + 8).bitwise_and_(15) - 8
        new = (z > half).to(torch.int8) - (z < -half).to(torch.int8)
        z.sub_(new, alpha=radix)
        if nibble:
            state.bitwise_and_(-16).bitwise_or_(z.bitwise_and_(15).to(torch.int8))
        else:
            state.copy_(z)
        trits[some] = pack_trits_torch(new)


def _z_torch(trits: Tensor, remainder: Tensor, radix: int, nibble: bool) -> Tensor:
    """Combine digits to z: (N, K) int16."""
    low = remainder << 4 >> 4 if nibble else remainder
    z = low.to(torch.int16)
    return z.add_(unpack_trits_torch(trits, remainder.shape[1]), alpha=radix)


@triton.jit
def _z_of(low, trit, RADIX: tl.constexpr, NIBBLE: tl.constexpr):
    if NIBBLE:
        low = (low << 28) >> 28
    return trit * RADIX + low


@triton.jit
def _last_bits_kernel(
    trits_ptr, remainder_ptr, bits_ptr,
    N, K, row_bytes,
    stride_tn, stride_tb, stride_an, stride_ak, stride_bp,
    RADIX: tl.constexpr, NIBBLE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    offs_b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    even, odd = 2 * pair, 2 * pair + 1
    mask_b = offs_b < row_bytes
    even_ptrs = trits_ptr + even * stride_tn + offs_b * stride_tb
    odd_ptrs = trits_ptr + odd * stride_tn + offs_b * stride_tb
    even_byte = tl.load(even_ptrs, mask=(even < N) & mask_b, other=0)  # [BLOCK_P, BLOCK_B]
    odd_byte = tl.load(odd_ptrs, mask=(odd < N) & mask_b, other=0)
    for digit in tl.static_range(5):
        k = plane_offsets(offs_b, K, digit)
        even_mask, odd_mask = (even < N) & (k < K), (odd < N) & (k < K)
        low_ptrs = remainder_ptr + k * stride_ak
        even_low = tl.load(low_ptrs + even * stride_an, mask=even_mask, other=0).to(tl.int32)
        odd_low = tl.load(low_ptrs + odd * stride_an, mask=odd_mask, other=0).to(tl.int32)
        low = _z_of(even_low, digit_of(even_byte, digit), RADIX, NIBBLE) & 15
        high = _z_of(odd_low, digit_of(odd_byte, digit), RADIX, NIBBLE) & 15
        high = tl.where(odd_mask, high, 0)
        tl.store(bits_ptr + pair * stride_bp + k, (low | (high << 4)).to(tl.uint8), mask=even_mask)


@triton.jit
def _take_last_bits_kernel(
    trits_ptr, remainder_ptr, bits_ptr,
    N, K, row_bytes,
    stride_tn, stride_tb, stride_an, stride_ak, stride_bp,
    RADIX: tl.constexpr, NIBBLE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    offs_b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    mask_b = offs_b < row_bytes
    for half in tl.static_range(2):
        n = 2 * pair + half
        mask_n = n < N
        trits_ptrs = trits_ptr + n * stride_tn + offs_b * stride_tb
        old = tl.load(trits_ptrs, mask=mask_n & mask_b, other=0)  # [BLOCK_P, BLOCK_B]
        byte = tl.zeros((BLOCK_P, BLOCK_B), dtype=tl.int32)
        for digit in tl.static_range(5):
            k = plane_offsets(offs_b, K, digit)
            mask = mask_n & (k < K)
            low_ptrs = remainder_ptr + n * stride_an + k * stride_ak
            state = tl.load(low_ptrs, mask=mask, other=0).to(tl.int32)
            low_bits = tl.load(bits_ptr + pair * stride_bp + k, mask=mask, other=0).to(tl.int32)
            z = _z_of(state, digit_of(old, digit), RADIX, NIBBLE)
            z += (((low_bits >> (4 * half)) - z + 8) & 15) - 8
            new = (z > RADIX // 2).to(tl.int32) - (z < -(RADIX // 2)).to(tl.int32)
            low = z - new * RADIX
            if NIBBLE:
                low = (state & -16) | (low & 15)
            tl.store(low_ptrs, low.to(tl.int8), mask=mask)
            byte += place(tl.where(k < K, new, 0), digit)
        tl.store(trits_ptrs, byte.to(tl.uint8), mask=mask_n & mask_b)


def _launch(
    kernel: Any, trits: Tensor, remainder: Tensor, bits: Tensor, radix: int, nibble: bool
) -> None:
    rows, columns = remainder.shape
    if remainder.numel():
        block_p, num_bytes = 16, trits.shape[1]
        kernel[(triton.cdiv(rows, 2 * block_p), triton.cdiv(num_bytes, PLANE))](
            trits, remainder, bits, rows, columns, num_bytes,
            *trits.stride(), *remainder.stride(), bits.stride(0),
            RADIX=radix, NIBBLE=nibble, BLOCK_P=block_p, BLOCK_B=PLANE,
        )  # fmt: skip


def _last_bits_triton(
    trits: Tensor, remainder: Tensor, radix: int, nibble: bool, out: Tensor | None = None
) -> Tensor:
    rows, columns = remainder.shape
    if out is None:
        out = torch.empty((rows + 1) // 2, columns, dtype=torch.uint8, device=trits.device)
    _launch(_last_bits_kernel, trits, remainder, out, radix, nibble)
    return out


def _take_last_bits_triton(
    trits: Tensor, remainder: Tensor, bits: Tensor, radix: int, nibble: bool
) -> None:
    _launch(_take_last_bits_kernel, trits, remainder, bits, radix, nibble)


_STATE = {"trits": Array("N, row_bytes(K)", UINT8), "remainder": Array("N, K", INT8)}
_BITS = Array("(N + 1) // 2, K", UINT8, dense="rows")
last_bits = Operation(
    "last_bits", _last_bits_triton, _last_bits_torch,
    {
        **_STATE, "radix": Number(), "nibble": Number(), "out": replace(_BITS, optional=True)
    },
)  # fmt: skip
"""Compute the last four bits of z.

Args:
    trits: (N, row_bytes(K)) uint8, the packed trits T.
    remainder: (N, K) int8, A; with `nibble`, A is the low half of each byte.
    radix: P.
    nibble: whether remainders have four bits.
    out: (ceil(N / 2), K) uint8 with contiguous rows, for the result; None allocates it.

Returns:
    `out`: z mod 16 of row 2p in the low half of row p, of row 2p + 1 in the high half, 0 where
    there is none.
"""

take_last_bits_ = Operation(
    "take_last_bits", _take_last_bits_triton, _take_last_bits_torch,
    {**_STATE, "bits": _BITS, "radix": Number(), "nibble": Number()},
)  # fmt: skip
"""Update z from its last four bits, in place.

Args:
    trits: (N, row_bytes(K)) uint8, the packed trits T.
    remainder: (N, K) int8, A; with `nibble`, A is the low half of each byte, and the high half
        does not change.
    bits: (ceil(N / 2), K) uint8 with contiguous rows, from `last_bits` of a z that is within
        -8..7 of this one.
    radix: P.
    nibble: whether remainders have four bits.
"""

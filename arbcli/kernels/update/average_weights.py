"""Average weights over steps: a <- a + SR((z / 2**shift - a) rate / 2**16), z = P T + A, in place.

SR rounds up above a threshold, 16 random bits of the element plus a turn. The bits stay, and the
turn advances by the golden ratio from sample to sample: the errors of successive samples cancel,
and the average has half of the error that new random bits would leave. With a shift of 1, a fits in
8 bits for z from -254 to 254.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import BLOCK, PLANE, TRITS_PER_BYTE
from arbcli.kernels.codec.packing import unpack_trits_torch
from arbcli.kernels.runtime.backend import count_tiles, row_chunks, tile_of_program
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.random_bits import random_halves, random_words

BLOCK_N, BLOCK_K = 8, 256


def _average_weights_torch(
    packed: Tensor, remainder: Tensor, average: Tensor, key: Tensor, turn: Tensor, rate: Tensor,
    radix: int, shift: int, nibble: bool,
) -> None:  # fmt: skip
    if rate == 0:
        return
    in_features = remainder.shape[1]
    columns = torch.arange(in_features, dtype=torch.int32, device=packed.device)
    for rows in row_chunks(remainder):
        low = remainder[rows] << 4 >> 4 if nibble else remainder[rows]
        z = unpack_trits_torch(packed[rows], in_features, torch.int32).mul_(radix).add_(low)
        step = z.sub_(average[rows], alpha=1 << shift).mul_(rate).bitwise_right_shift_(shift)
        threshold = random_halves(key, rows, columns, turn)
        step.add_(threshold).bitwise_right_shift_(16)
        average[rows] += step.to(torch.int8)


@triton.jit
def _average_weights_kernel(
    packed_ptr, remainder_ptr, average_ptr, key_ptr, turn_ptr, rate_ptr, N, K,
    stride_pn, stride_pb, stride_rn, stride_rk, stride_an, stride_ak,
    RADIX: tl.constexpr, SHIFT: tl.constexpr, NIBBLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    rate = tl.load(rate_ptr)
    if rate == 0:
        return
    n, k, mask = tile_of_program(N, K, BLOCK_N, BLOCK_K)
    # byte and digit of each column: a block of 160 columns has 5 planes, and the last may be short
    block = k // COLUMNS
    width = tl.minimum((K - block * COLUMNS + DIGITS - 1) // DIGITS, WIDTH)
    width = tl.maximum(width, 1)  # of masked columns
    place = k - block * COLUMNS
    byte_ptrs = packed_ptr + n * stride_pn + (block * WIDTH + place % width) * stride_pb
    left = tl.load(byte_ptrs, mask=mask, other=121).to(tl.int32)
    digit = place // width
    for plane in tl.static_range(DIGITS - 1):
        left = tl.where(digit > plane, left // 3, left)
    low = tl.load(remainder_ptr + n * stride_rn + k * stride_rk, mask=mask, other=0).to(tl.int32)
    if NIBBLE:
        low = low << 28 >> 28
    z = (left % 3 - 1) * RADIX + low
    # one word of random bits serves two rows
    words = random_words(tl.load(key_ptr), n // 2, k)
    random = tl.where(n % 2 == 0, words & 0xFFFF, words >> 16).to(tl.int32)
    threshold = (random + tl.load(turn_ptr)) & 0xFFFF
    average_ptrs = average_ptr + n * stride_an + k * stride_ak
    average = tl.load(average_ptrs, mask=mask, other=0).to(tl.int32)
    average += (((z - (average << SHIFT)) * rate >> SHIFT) + threshold) >> 16
    tl.store(average_ptrs, average.to(tl.int8), mask=mask)


def _average_weights_triton(
    packed: Tensor, remainder: Tensor, average: Tensor, key: Tensor, turn: Tensor, rate: Tensor,
    radix: int, shift: int, nibble: bool,
) -> None:  # fmt: skip
    rows, columns = remainder.shape
    if remainder.numel():
        grid = (count_tiles(rows, columns, BLOCK_N, BLOCK_K),)
        _average_weights_kernel[grid](
            packed, remainder, average, key, turn, rate, rows, columns,
            *packed.stride(), *remainder.stride(), *average.stride(),
            RADIX=radix, SHIFT=shift, NIBBLE=nibble, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            COLUMNS=BLOCK, WIDTH=PLANE, DIGITS=TRITS_PER_BYTE,
        )  # fmt: skip


average_weights = Operation(
    "average_weights", _average_weights_triton, _average_weights_torch,
    "packed: uint8[N, row_bytes(K)]; remainder, average: int8[N, K]; key, turn, rate: int32[]; "
    "radix; shift; nibble",
)  # fmt: skip
"""Move the average of weights towards them, in place.

Args:
    packed: (N, bytes) uint8 packed trits T.
    remainder: (N, K) int8 remainders A, or bytes with A in their low half.
    average: (N, K) int8; 2**shift of it is the average of z.
    key: int32 scalar tensor, from `stream_keys`; the same for all samples.
    turn: int32 scalar tensor in 0..65535, the offset of the thresholds.
    rate: int32 scalar tensor in 0..65536; 65536 copies, and 0 changes nothing.
    radix: P.
    shift: 0, for z from -127 to 127, or 1.
    nibble: whether A is the low half of a byte.
"""

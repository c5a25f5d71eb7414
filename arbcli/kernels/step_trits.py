"""Step weights: z <- clip(z - SR(u * gain)), z = P T + A, carried between the two digits, in place.

The trit T is the leading digit of one integer z and the remainder A the digit below it: after the
step T = sign(z) where |z| > P / 2, else 0, and A = z - P T, so nothing is ever reset or lost. The
direction u is the int8 moment (`moment`), the high half of a byte beside A (`nibble`), or the
step's own direction in int32 (`carry`). With 16 fractional bits the step is
d = (u * gain) >> shift, clipped to +-limit, and rounded stochastically: floor((d + r) / 2**16), r
uniform in 0..65535.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels._triton import tl, triton
from arbcli.kernels.backend import row_chunks, uses_triton
from arbcli.kernels.packing import (
    PLANE,
    byte_tiles,
    check_packed,
    digit_of,
    pack_trits_reference,
    pack_trits_torch,
    place,
    plane_offsets,
    random_trits,
    unpack_trits_reference,
    unpack_trits_torch,
)
from arbcli.kernels.random_bits import random_bits, random_bits_reference, random_words
from arbcli.kernels.spec import MATRIX, Case, KernelSpec, Timing

CLIP = 1 << 18
"""An int32 direction saturates here, at 4 times its root-mean-square."""


def step_trits_reference(
    packed: Tensor,
    remainder: Tensor,
    direction: Tensor | None,
    key: Tensor,
    gain: Tensor,
    shift: Tensor,
    limit: Tensor,
    ok: Tensor,
    radix: int,
    remainder_max: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `step_trits` leaves in `packed` and `remainder`, and returns, in int64."""
    if not ok:
        return packed, remainder, torch.zeros((), dtype=torch.int64, device=packed.device)
    trits = unpack_trits_reference(packed, remainder.shape[1]).to(torch.int64)
    low = remainder.to(torch.int64)
    if direction is None:  # a nibble: both digits are in one byte
        u = torch.div(low, 16, rounding_mode="floor")
        low = (low % 16 + 8) % 16 - 8
    else:
        u = direction.to(torch.int64).clamp(-(2**18), 2**18)
    step = torch.div(u * gain.to(torch.int64), 2 ** int(shift), rounding_mode="floor")
    step = step.clamp(-int(limit), int(limit))
    random = random_bits_reference(int(key), *remainder.shape).to(packed.device) % 2**16
    z = trits * radix + low - torch.div(step + random, 2**16, rounding_mode="floor")
    z = z.clamp(-radix - remainder_max, radix + remainder_max)
    new = torch.sign(z) * (z.abs() > radix // 2)
    low = z - new * radix
    if direction is None:
        low = u * 16 + low % 16
    packed = pack_trits_reference(new.to(torch.int8))
    return packed, low.to(torch.int8), (new != trits).sum()


def _step_trits_torch(
    packed, remainder, direction, key, gain, shift, limit, ok, radix, remainder_max
):
    flips = torch.zeros((), dtype=torch.int64, device=packed.device)
    if not ok:
        return packed, remainder, flips
    in_features = remainder.shape[1]
    columns = torch.arange(in_features, dtype=torch.int32, device=packed.device)
    gain, shift, limit = int(gain), int(shift), int(limit)
    for rows in row_chunks(remainder):
        old = unpack_trits_torch(packed[rows], in_features)
        low = remainder[rows].to(torch.int32)
        if direction is None:
            u, low = low >> 4, low << 28 >> 28
        else:
            u = direction[rows].to(torch.int32).clamp(-CLIP, CLIP)
        index = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=packed.device)
        step = ((u * gain) >> shift).clamp_(-limit, limit)
        step += random_bits(key, index, columns) & 0xFFFF
        z = low - (step >> 16)
        z += old.to(torch.int32) * radix
        z.clamp_(-radix - remainder_max, radix + remainder_max)
        new = (z > radix // 2).to(torch.int8) - (z < -(radix // 2)).to(torch.int8)
        z -= new.to(torch.int32) * radix
        remainder[rows] = (u << 4 | z & 15 if direction is None else z).to(torch.int8)
        packed[rows] = pack_trits_torch(new)
        flips += (new != old).sum()
    return packed, remainder, flips


@triton.jit
def _step_trits_kernel(
    packed_ptr, remainder_ptr, direction_ptr,
    key_ptr, gain_ptr, shift_ptr, limit_ptr, ok_ptr, flips_ptr,
    N, K, row_bytes,
    stride_pn, stride_pb, stride_an, stride_ak, stride_un, stride_uk,
    RADIX: tl.constexpr, REMAINDER_MAX: tl.constexpr, CLIP: tl.constexpr, NIBBLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.load(ok_ptr) == 0:
        tl.store(flips_ptr + program, 0)
        return
    key = tl.load(key_ptr)
    gain, shift, limit = tl.load(gain_ptr), tl.load(shift_ptr), tl.load(limit_ptr)
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_n = offs_n < N
    mask_byte = mask_n & (offs_b < row_bytes)[None, :]
    packed_ptrs = packed_ptr + offs_n * stride_pn + offs_b[None, :] * stride_pb
    byte = tl.load(packed_ptrs, mask=mask_byte, other=0)  # [BLOCK_N, BLOCK_B] uint8

    new_byte = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.int32)
    flips = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.int32)
    for digit in tl.static_range(5):
        k = plane_offsets(offs_b, K, digit)[None, :]
        mask = mask_n & (k < K)
        remainder_ptrs = remainder_ptr + offs_n * stride_an + k * stride_ak
        low = tl.load(remainder_ptrs, mask=mask, other=0).to(tl.int32)
        if NIBBLE:
            u = low >> 4
            low = (low << 28) >> 28
        else:
            u = tl.load(direction_ptr + offs_n * stride_un + k * stride_uk, mask=mask, other=0).to(
                tl.int32
            )
            u = tl.minimum(tl.maximum(u, -CLIP), CLIP)
        step = tl.minimum(tl.maximum((u * gain) >> shift, -limit), limit)
        step += (random_words(key, offs_n, k) & 0xFFFF).to(tl.int32)

        old = digit_of(byte, digit)
        z = old * RADIX + low - (step >> 16)
        z = tl.minimum(tl.maximum(z, -RADIX - REMAINDER_MAX), RADIX + REMAINDER_MAX)
        new = (z > RADIX // 2).to(tl.int32) - (z < -(RADIX // 2)).to(tl.int32)
        new = tl.where(mask, new, 0)  # padding trits stay 0
        low = z - new * RADIX
        if NIBBLE:
            low = (u << 4) | (low & 15)
        tl.store(remainder_ptrs, low.to(tl.int8), mask=mask)
        new_byte += place(new, digit)
        flips += (mask & (new != old)).to(tl.int32)

    tl.store(packed_ptrs, new_byte.to(tl.uint8), mask=mask_byte)
    tl.store(flips_ptr + program, tl.sum(flips))


def _step_trits_triton(
    packed, remainder, direction, key, gain, shift, limit, ok, radix, remainder_max
):
    (rows, in_features), num_bytes = remainder.shape, packed.shape[1]
    grid = byte_tiles(rows, num_bytes)
    flips = torch.empty(grid, dtype=torch.int32, device=packed.device)
    if flips.numel():
        source = remainder if direction is None else direction
        _step_trits_kernel[grid](
            packed, remainder, source, key, gain, shift, limit, ok, flips,
            rows, in_features, num_bytes,
            *packed.stride(), *remainder.stride(), *source.stride(),
            RADIX=radix, REMAINDER_MAX=remainder_max, CLIP=CLIP, NIBBLE=direction is None,
            BLOCK_N=32, BLOCK_B=PLANE, num_warps=8,  # with 4 the registers spill
        )  # fmt: skip
    return packed, remainder, flips.sum(dtype=torch.int64)


def step_trits(
    packed: Tensor,
    remainder: Tensor,
    direction: Tensor | None,
    key: Tensor,
    gain: Tensor,
    shift: Tensor,
    limit: Tensor,
    ok: Tensor,
    radix: int,
    remainder_max: int,
) -> Tensor:
    """Step a matrix of weights in place, carrying between trit and remainder.

    Args:
        packed: (N, row_bytes(K)) uint8, the trits T.
        remainder: (N, K) int8, A; with no `direction`, bytes of 16 m + (A mod 16).
        direction: (N, K) int8 moment, or int32 u in units of 2**-16, clipped to +-4; None for a
            nibble.
        key: int32 scalar tensor, from `stream_keys`.
        gain: int32 scalar tensor; u * gain must fit int32 (below 2**12 for int32, 2**23 for int8).
        shift: int32 scalar tensor; d = (u * gain) >> shift, in units of 2**-16 of z.
        limit: int32 scalar tensor, the largest |d|.
        ok: int32 scalar tensor; where 0 nothing changes.
        radix: P, what a trit is worth in units of A.
        remainder_max: z is clipped to +-(P + remainder_max).

    Returns:
        int64 scalar tensor, the number of trits that changed.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    check_packed(packed, remainder.shape[1])
    if remainder.dtype != torch.int8 or remainder.shape[0] != packed.shape[0]:
        raise ValueError(f"remainder {remainder.dtype} {tuple(remainder.shape)} does not fit")
    if direction is not None and (
        direction.dtype not in (torch.int8, torch.int32) or direction.shape != remainder.shape
    ):
        raise ValueError(f"direction {direction.dtype} {tuple(direction.shape)} does not fit")
    run = _step_trits_triton if uses_triton(packed) else _step_trits_torch
    scalars = (key, gain, shift, limit, ok)
    return run(packed, remainder, direction, *scalars, radix, remainder_max)[2]


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, shape: tuple[int, int]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def scalars(*values: int) -> list[Tensor]:
        return [torch.tensor(value, dtype=torch.int32, device=device) for value in values]

    def state(shape: tuple[int, int], radix: int, largest: int) -> tuple[Tensor, Tensor]:
        z = integers(-radix - largest, radix + largest + 1, shape)
        trits = torch.sign(z) * (z.abs() > radix // 2)
        return pack_trits_reference(trits.to(torch.int8)), (z - trits * radix).to(torch.int8)

    def on_device(*tensors: Tensor) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]

    for shape in ((1, 1), (3, 33), (33, 165), (2, 1311)):
        name = f"{shape[0]}x{shape[1]}"
        packed, remainder = state(shape, 32, 127)
        moment = integers(-127, 128, shape).to(torch.int8)
        control = scalars(987654321, 5000, 0, 4 * 2 * 2**16, 1)
        yield Case(f"{name} moment", (*on_device(packed, remainder, moment), *control, 32, 127))

        direction = (torch.randn(shape, generator=generator) * 2**17).to(torch.int32)
        control = scalars(-5, 3000, 10, 4 * 2 * 2**16, 1)
        inputs = (*on_device(packed, remainder, direction), *control, 32, 127)
        yield Case(f"{name} carry", inputs)

        packed, remainder = state(shape, 8, 7)
        digits = integers(-7, 8, shape) * 16 + remainder % 16
        control = scalars(77, 20000, 0, 2**17, 1)
        nibble = (*on_device(packed, digits.to(torch.int8)), None, *control, 8, 7)
        yield Case(f"{name} nibble", nibble)
    yield Case("2x1311 refused", (*inputs[:7], *scalars(0), *inputs[8:]))
    largest = on_device(torch.full_like(direction, 2**31 - 1))[0]
    for sign in (1, -1):
        yield Case(f"2x1311 saturated {sign:+}", (*inputs[:2], sign * largest, *inputs[3:]))
    packed, remainder, direction = on_device(
        pack_trits_reference(random_trits(6, 165, generator)),
        integers(-15, 16, (6, 330)).to(torch.int8),
        integers(-(2**17), 2**17, (6, 330)).to(torch.int32),
    )
    strided = (packed[::2], remainder[::2, ::2], direction[::2, 1::2])
    yield Case("3x165 strided", (*strided, *inputs[3:]))


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    def draw(largest: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(-largest, largest + 1, MATRIX, dtype=dtype, device=device)

    packed = pack_trits_torch(draw(1))
    control = torch.tensor((-5, 5000, 0, 2**19, 1), dtype=torch.int32, device=device)
    for kind, direction in (("moment", draw(127)), ("carry", draw(2**17, torch.int32))):
        yield Timing(f"11264x2048 {kind}", (packed, draw(15), direction, *control, 32, 127))
    yield Timing("11264x2048 nibble", (packed, draw(119), None, *control, 8, 7))


STEP_TRITS = KernelSpec(
    "step_trits",
    _step_trits_triton,
    _step_trits_torch,
    step_trits_reference,
    _cases,
    timings=_timings,
)

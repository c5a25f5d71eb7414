"""Blend a step's direction into the moment: m <- SR(decay * m + gain * u), saturating, in place.

m is int8 in units of `range / max` of the rule, u int32 in units of 2**-16 of its root-mean-square.
All of it is int32: with 16 fractional bits, t = m * decay + ((u * gain) >> shift), and stochastic
rounding is floor((t + r) / 2**16) with r uniform in 0..65535, which is unbiased exactly. In a
nibble m is the high half of a byte, beside the remainder.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels._triton import tl, triton
from arbcli.kernels.backend import row_chunks, uses_triton
from arbcli.kernels.random_bits import random_bits, random_bits_reference, random_words
from arbcli.kernels.spec import MATRIX, Case, KernelSpec, Timing

DIRECTION_LIMIT = 1 << 21
"""|u| saturates here, at 32 times its root-mean-square, so that u * gain fits int32."""


def moment_max(nibble: bool) -> int:
    """Largest magnitude of a moment: int8, or the half of a byte."""
    return 7 if nibble else 127


def blend_moment_reference(
    moment: Tensor,
    direction: Tensor,
    key: Tensor,
    ok: Tensor,
    decay: int,
    gain: int,
    shift: int,
    nibble: bool,
) -> tuple[Tensor, Tensor]:
    """Compute what `blend_moment` leaves in `moment`, and what it returns, in int64."""
    if not ok:
        return moment, torch.zeros((), dtype=torch.int64, device=moment.device)
    state = moment.to(torch.int64)
    old = torch.div(state, 16, rounding_mode="floor") if nibble else state
    u = direction.to(torch.int64).clamp(-(2**21), 2**21)
    blended = old * decay + torch.div(u * gain, 2**shift, rounding_mode="floor")
    random = random_bits_reference(int(key), *moment.shape).to(moment.device) % 2**16
    new = torch.div(blended + random, 2**16, rounding_mode="floor")
    largest = 7 if nibble else 127
    new = new.clamp(-largest, largest)
    total = (new * new).sum()
    return (new * 16 + state % 16 if nibble else new).to(torch.int8), total


def _blend_moment_torch(moment, direction, key, ok, decay, gain, shift, nibble):
    total = torch.zeros((), dtype=torch.int64, device=moment.device)
    if not ok:
        return moment, total
    largest = moment_max(nibble)
    columns = torch.arange(moment.shape[1], dtype=torch.int32, device=moment.device)
    for rows in row_chunks(moment):
        state = moment[rows]
        u = direction[rows].clamp(-DIRECTION_LIMIT, DIRECTION_LIMIT)
        new = (u * gain) >> shift
        new += (state >> 4 if nibble else state).to(torch.int32) * decay
        index = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=moment.device)
        new += random_bits(key, index, columns) & 0xFFFF
        new >>= 16
        new.clamp_(-largest, largest)
        total += (new * new).sum()
        state.copy_(new << 4 | state & 15 if nibble else new)
    return moment, total


@triton.jit
def _blend_moment_kernel(
    moment_ptr, direction_ptr, key_ptr, ok_ptr, squares_ptr,
    N, K, decay, gain, shift,
    stride_mn, stride_mk, stride_un, stride_uk,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, NIBBLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.load(ok_ptr) == 0:
        tl.store(squares_ptr + program, 0)
        return
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    offs_k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (offs_n < N) & (offs_k < K)
    moment_ptrs = moment_ptr + offs_n * stride_mn + offs_k * stride_mk
    state = tl.load(moment_ptrs, mask=mask, other=0).to(tl.int32)
    u = tl.load(direction_ptr + offs_n * stride_un + offs_k * stride_uk, mask=mask, other=0)
    u = tl.minimum(tl.maximum(u, -LIMIT), LIMIT)

    old = state >> 4 if NIBBLE else state
    new = old * decay + ((u * gain) >> shift)
    new += (random_words(tl.load(key_ptr), offs_n, offs_k) & 0xFFFF).to(tl.int32)
    new = tl.minimum(tl.maximum(new >> 16, -LARGEST), LARGEST)

    state = (new << 4) | (state & 15) if NIBBLE else new
    tl.store(moment_ptrs, state.to(tl.int8), mask=mask)
    tl.store(squares_ptr + program, tl.sum(tl.where(mask, new * new, 0)))


def _blend_moment_triton(moment, direction, key, ok, decay, gain, shift, nibble):
    rows, columns = moment.shape
    grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 256))
    squares = torch.empty(grid, dtype=torch.int32, device=moment.device)
    if squares.numel():
        _blend_moment_kernel[grid](
            moment, direction, key, ok, squares, rows, columns, decay, gain, shift,
            *moment.stride(), *direction.stride(),
            LIMIT=DIRECTION_LIMIT, LARGEST=moment_max(nibble), NIBBLE=nibble,
            BLOCK_N=16, BLOCK_K=256,
        )  # fmt: skip
    return moment, squares.sum(dtype=torch.int64)


def blend_moment(
    moment: Tensor,
    direction: Tensor,
    key: Tensor,
    ok: Tensor,
    decay: int,
    gain: int,
    shift: int,
    nibble: bool,
) -> Tensor:
    """Blend a direction into the moment, in place.

    Args:
        moment: (N, K) int8; with `nibble`, bytes of 16 m + (remainder mod 16).
        direction: (N, K) int32, u in units of 2**-16; saturates at 2**21.
        key: int32 scalar tensor, from `stream_keys`.
        ok: int32 scalar tensor; where 0 nothing changes.
        decay: multiplier of m in units of 2**-16, 0..65536.
        gain: multiplier of u, 0..1023.
        shift: the product with `gain` is shifted right by it.
        nibble: whether m is the high half of a byte.

    Returns:
        int64 scalar tensor, the sum of the new m squared over the matrix; 0 where not `ok`.

    Raises:
        ValueError: a dtype or a shape does not fit, or the arithmetic could overflow int32.
    """
    if moment.dtype != torch.int8 or direction.dtype != torch.int32:
        raise ValueError(f"need int8 and int32, got {moment.dtype} and {direction.dtype}")
    if moment.shape != direction.shape:
        raise ValueError(f"moment {tuple(moment.shape)}, direction {tuple(direction.shape)}")
    if not (0 <= decay <= 1 << 16 and 0 <= gain < 1 << 10):
        raise ValueError(f"decay {decay} or gain {gain} overflows int32")
    run = _blend_moment_triton if uses_triton(moment) else _blend_moment_torch
    return run(moment, direction, key, ok, decay, gain, shift, nibble)[1]


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def scalar(value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int32, device=device)

    for nibble in (False, True):
        name = " nibble" if nibble else ""
        largest = moment_max(nibble)
        for rows, columns in ((1, 1), (3, 33), (17, 259)):
            moment = torch.randint(-largest, largest + 1, (rows, columns), generator=generator)
            if nibble:
                remainder = torch.randint(0, 16, (rows, columns), generator=generator)
                moment = moment * 16 + remainder
            moment = moment.to(torch.int8).to(device)
            direction = torch.randn(rows, columns, generator=generator) * 2**16
            direction = direction.to(torch.int32).to(device)
            shape = f"{rows}x{columns}{name}"
            scalars = (scalar(-123456789), scalar(1), 58982, 813, 7, nibble)
            yield Case(shape, (moment, direction, *scalars))
        extreme = torch.full_like(direction, 2**31 - 1)
        extreme[::2] = -(2**31)
        yield Case(f"{shape} saturated", (moment, extreme, *scalars))
        yield Case(f"{shape} zero direction", (moment, torch.zeros_like(direction), *scalars))
        yield Case(f"{shape} refused", (moment, direction, scalar(7), scalar(0), *scalars[2:]))
        yield Case(
            f"{shape} no decay", (moment, direction, scalar(7), scalar(1), 65536, 597, 9, nibble)
        )
    yield Case("6x86 strided", (moment[1::3, ::3], direction[1::3, ::3], *scalars))


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    key, ok = torch.ones(2, dtype=torch.int32, device=device)
    direction = torch.randint(-(2**17), 2**17, MATRIX, dtype=torch.int32, device=device)
    for nibble in (False, True):
        moment = torch.randint(-112, 113, MATRIX, dtype=torch.int8, device=device)
        inputs = (moment, direction, key, ok, 58982, 813, 7, nibble)
        yield Timing(f"11264x2048{' nibble' if nibble else ''}", inputs)


BLEND_MOMENT = KernelSpec(
    "blend_moment",
    _blend_moment_triton,
    _blend_moment_torch,
    blend_moment_reference,
    _cases,
    timings=_timings,
)

"""Update the first moment from a direction: m <- SR(decay * m + gain * u), saturating, in place.

m is int8 in units of `range / max` of the rule, u the direction in units of 2**-16 of its
root-mean-square. All of it is int32: with 16 fractional bits,
t = m * decay + ((u * gain) >> shift), and stochastic rounding is floor((t + r) / 2**16) with r
uniform in 0..65535, which is unbiased exactly. In a nibble m is the high half of a byte, whose
low half is the remainder. With a turn, r is (r + turn) mod 2**16: see `step_trits`.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import count_tiles, row_chunks, tiles_of_a_program
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.direction import (
    GAINS_BELONG,
    MAX_REGISTERS,
    fixed_point,
    fixed_point_torch,
    load_gain,
    native_arguments,
    registers_of,
)
from arbcli.kernels.update.random_bits import random_halves, random_words

DIRECTION_LIMIT = 1 << 21
"""|u| saturates here, at 32 times its root-mean-square, so that u * gain fits int32."""
LARGE_TILE, SMALL_TILE = (512, 2), (256, 1)
"""Columns and warps of a program, for large and for small matrices."""
PAIRS = 2
"""Pairs of rows of a program."""


def moment_max(nibble: bool) -> int:
    """Return the largest magnitude of a moment, in int8 or a nibble."""
    return 7 if nibble else 127


def _blend_moment_torch(
    moment: Tensor, values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None,
    key: Tensor, ok: Tensor, squares: Tensor, decay: int, gain: Tensor, shift: Tensor,
    nibble: bool, turn: Tensor | None = None,
) -> None:  # fmt: skip
    if not ok:
        return
    largest, factor, bits = moment_max(nibble), int(gain), int(shift)
    columns = torch.arange(moment.shape[1], dtype=torch.int32, device=moment.device)
    for rows in row_chunks(moment):
        state = moment[rows]
        new = fixed_point_torch(values, row_gain, column_gain, rows, DIRECTION_LIMIT)
        new.mul_(factor).bitwise_right_shift_(bits)
        new += random_halves(key, rows, columns, turn)
        new.add_(state >> 4 if nibble else state, alpha=decay)
        new.bitwise_right_shift_(16).clamp_(-largest, largest)
        if nibble:
            state.bitwise_and_(15).bitwise_or_(new.to(torch.int8) << 4)
        else:
            state.copy_(new)
        squares += new.mul_(new).sum(dim=1, dtype=torch.int32).sum()


def _blend_moment_native(
    moment: Tensor, values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None,
    key: Tensor, ok: Tensor, squares: Tensor, decay: int, gain: Tensor, shift: Tensor,
    nibble: bool, turn: Tensor | None = None,
) -> None:  # fmt: skip
    direction = values, row_gain, column_gain
    if not native.has_dense_rows(moment):
        _blend_moment_torch(moment, *direction, key, ok, squares, decay, gain, shift, nibble, turn)
    elif ok:
        squares += native.call(
            "blend_moment", *native_arguments(*direction), moment, moment.stride(0), int(key),
            0 if turn is None else int(turn), decay, int(gain), int(shift), nibble, len(moment),
            native.threads_for(moment.numel()),
        )  # fmt: skip


@triton.jit
def _blend_moment_kernel(
    moment_ptr, values_ptr, row_gain_ptr, column_gain_ptr, key_ptr, turn_ptr, gain_ptr, shift_ptr,
    ok_ptr, squares_ptr, N, K, decay,
    stride_mn, stride_mk, stride_vn, stride_vk, stride_rn,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, NIBBLE: tl.constexpr,
    TURNS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Update `PAIRS` pairs of rows, 2 i and 2 i + 1, in `BLOCK_K` columns."""
    if tl.load(ok_ptr) == 0:
        return
    key, gain, shift = tl.load(key_ptr), tl.load(gain_ptr), tl.load(shift_ptr)
    turn = tl.load(turn_ptr).to(tl.uint32) if TURNS else 0
    tiles_k = tl.cdiv(K, BLOCK_K)
    first, tile_k = tl.program_id(0).to(tl.int64) // tiles_k * PAIRS, tl.program_id(0) % tiles_k
    first += tl.arange(0, 1)  # [1], which is broadcast
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = k < K
    column_gain = load_gain(column_gain_ptr, k, mask_k, HAS_COLUMNS)
    rows = ()  # loaded before the first store, as later loads would wait for it
    for row in tl.static_range(2 * PAIRS):
        n = 2 * first + row
        mask = (n < N) & mask_k
        values = tl.load(values_ptr + n * stride_vn + k * stride_vk, mask=mask, other=0)
        state = tl.load(moment_ptr + n * stride_mn + k * stride_mk, mask=mask, other=0)
        row_gain = load_gain(row_gain_ptr, n * stride_rn, n < N, HAS_ROWS)
        rows = rows + ((values, state, row_gain),)  # noqa: RUF005 (triton knows no star)
    squares = tl.zeros((BLOCK_K,), dtype=tl.int32)
    for i in tl.static_range(PAIRS):
        # one word of random bits serves two rows
        words = random_words(key, first + i, k)  # [BLOCK_K]
        for half in tl.static_range(2):
            n = 2 * (first + i) + half
            values, state, row_gain = rows[2 * i + half]
            # direction in fixed point, then the new moment with 16 fractional bits
            u = fixed_point(values, row_gain, column_gain, LIMIT, HAS_ROWS)
            state = state.to(tl.int32)
            old = state >> 4 if NIBBLE else state
            new = old * decay + ((u * gain) >> shift)
            # stochastic rounding: add random bits, clip, and drop the fraction
            random = words >> (16 * half)
            if TURNS:
                random += turn
            new += (random & 0xFFFF).to(tl.int32)
            # clipped before the shift, as an addition and a maximum are one instruction
            new = tl.minimum(tl.maximum(new, -LARGEST << 16), (LARGEST << 16) + 0xFFFF) >> 16
            squares += new * new  # 0 where masked
            state = (new << 4) | (state & 15) if NIBBLE else new
            moment_ptrs = moment_ptr + n * stride_mn + k * stride_mk
            tl.store(moment_ptrs, state.to(tl.int8), mask=(n < N) & mask_k)
    tl.atomic_add(squares_ptr, tl.sum(squares).to(tl.int64))


def _blend_moment_triton(
    moment: Tensor, values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None,
    key: Tensor, ok: Tensor, squares: Tensor, decay: int, gain: Tensor, shift: Tensor,
    nibble: bool, turn: Tensor | None = None,
) -> None:  # fmt: skip
    rows, columns = moment.shape
    if moment.numel():
        has_rows, has_columns = row_gain is not None, column_gain is not None
        width, warps = tiles_of_a_program(moment, SMALL_TILE, LARGE_TILE)
        grid = (count_tiles(rows, columns, 2 * PAIRS, width),)
        _blend_moment_kernel[grid](
            moment, values, row_gain if has_rows else values,
            column_gain if has_columns else values, key, key if turn is None else turn, gain, shift,
            ok, squares, rows, columns, decay,
            *moment.stride(), *values.stride(), 0 if row_gain is None else row_gain.stride(0),
            LIMIT=DIRECTION_LIMIT, LARGEST=moment_max(nibble), NIBBLE=nibble,
            TURNS=turn is not None, HAS_ROWS=has_rows, HAS_COLUMNS=has_columns, PAIRS=PAIRS,
            BLOCK_K=width,
            enable_fp_fusion=False, num_warps=warps,
            maxnreg=MAX_REGISTERS if nibble else registers_of(moment),
        )  # fmt: skip


blend_moment = Operation(
    "blend_moment", _blend_moment_triton, _blend_moment_torch,
    "moment: int8[N, K]; values: real[N, K]; row_gain: float32[N]?; "
    "column_gain: float32[K]? dense; key, ok: int32[]; squares: int64[]; decay; "
    "gain, shift: int32[]; nibble; turn: int32[]?",
    native=_blend_moment_native, where=(GAINS_BELONG, f"0 <= decay <= {1 << 16}"),
)  # fmt: skip
"""Blend a direction into the moment, in place.

Args:
    moment: (N, K) int8; with `nibble`, bytes of 16 m + (remainder mod 16).
    values: (N, K) float32 or bfloat16, any strides.
    row_gain: (N,) float32; u = values * row_gain * column_gain in units of 2**-16, saturating
        at 2**21. None for the sign of the values.
    column_gain: (K,) float32; None for ones.
    key: int32 scalar tensor, from `stream_keys`.
    ok: int32 scalar tensor; if 0, nothing changes.
    squares: int64 scalar tensor; the sum of the new m squared over the matrix is added to it.
    decay: multiplier of m in units of 2**-16, 0..65536.
    gain: int32 scalar tensor, multiplier of u, 0..1023.
    shift: int32 scalar tensor; the product with `gain` is shifted right by it.
    nibble: whether m is the high half of a byte.
    turn: int32 scalar tensor, 0..65535, the offset of the random bits; None for 0.
"""

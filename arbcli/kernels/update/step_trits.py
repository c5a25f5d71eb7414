"""Step weights: z <- clip(SR(z - u * gain)), z = P T + A, carried between the two digits, in place.

The trit T is the leading digit of one integer z and the remainder A the digit below it: after the
step T = sign(z) where |z| > P / 2, else 0, and A = z - P T, so nothing is ever reset or lost. With
16 fractional bits the step is d = (u * gain) >> shift, clipped to +-limit, and the difference is
rounded stochastically: floor((2**16 z - d + r) / 2**16), r uniform in 0..65535. With weight decay d
is (z * decay) >> 8 larger, decay in units of 2**-24, which is not clipped.

r may be turned: (r + turn) mod 2**16. With a key that stays and a turn that grows by
`GOLDEN_TURN` a step, the r of an element are a low-discrepancy sequence: steps of one size are
rounded up as often as they should be within a few steps, and rounding noise does not add up.

`step_by_moment`: u is the int8 moment, or the high half of a byte next to A, and the gain brings it
to unit root-mean-square: floor(step_size / sqrt(squares / (N K)) + 1/2), each operation one of
correctly rounded float32.
`step_by_direction`: u is the step's own direction.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import BLOCK
from arbcli.kernels.codec.packing import pack_trits_torch, unpack_trits_torch
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.direction import (
    GAINS_BELONG,
    fixed_point,
    fixed_point_torch,
    load_gain,
    native_arguments,
    registers_of,
)
from arbcli.kernels.update.random_bits import random_halves, random_words

GOLDEN_TURN = 40503
"""2**16 over the golden ratio: its multiples, modulo 2**16, are spread as evenly as any."""
CLIP = 1 << 18
"""A direction saturates here, at 4 times its root-mean-square."""
MAX_GAIN = 1 << 23
"""A gain of the moment saturates here, so that their product fits int32."""
MAX_DECAY = 1 << 21
"""Maximum decay, an eighth, with which its product with z fits int32."""


def moment_gain(step_size: Tensor, squares: Tensor, num_weights: int) -> int:
    """Compute the integer gain of the moment; waits for the device.

    Between tensors on the CPU every operation is one correctly rounded float32 operation; a root is
    that of float64 rounded, as torch's in float32 is off by a bit on some CPUs.

    Args:
        step_size: int64 scalar tensor, in units of 2**-32 of z.
        squares: int64 scalar tensor, sum of the squares of the moment.
        num_weights: number of elements of the moment.
    """
    size, total = (x.to("cpu", torch.float32) for x in (step_size.float() * 2.0**-16, squares))
    mean_square = total / torch.tensor(num_weights, dtype=torch.float32)
    root = mean_square.double().sqrt().float()
    gain = (size / root).clamp(max=MAX_GAIN)
    return int(torch.floor(gain + 0.5))


def _step_by_moment_torch(
    packed: Tensor, remainder: Tensor, moment: Tensor | None, key: Tensor, turn: Tensor | None,
    step_size: Tensor, squares: Tensor, limit: Tensor, ok: Tensor, flips: Tensor, radix: int,
    remainder_max: int, decay: Tensor | None = None,
) -> None:  # fmt: skip
    if ok:
        gain = moment_gain(step_size, squares, remainder.numel())

        def step_of(rows: slice) -> Tensor:
            u = remainder[rows] >> 4 if moment is None else moment[rows]
            return u.to(torch.int32).mul_(gain)

        nibble, largest_step = moment is None, int(limit)
        _step_torch(
            packed, remainder, step_of, key, largest_step, flips, radix, remainder_max, nibble,
            turn, decay,
        )  # fmt: skip


def _step_by_direction_torch(
    packed: Tensor, remainder: Tensor, values: Tensor, row_gain: Tensor | None,
    column_gain: Tensor | None, key: Tensor, gain: Tensor, shift: Tensor, limit: Tensor, ok: Tensor,
    flips: Tensor, radix: int, remainder_max: int, decay: Tensor | None = None,
    turn: Tensor | None = None, nibble: bool = False,
) -> None:  # fmt: skip
    if ok:
        factor, bits, largest_step = int(gain), int(shift), int(limit)

        def step_of(rows: slice) -> Tensor:
            u = fixed_point_torch(values, row_gain, column_gain, rows, CLIP)
            return u.mul_(factor).bitwise_right_shift_(bits)

        _step_torch(
            packed, remainder, step_of, key, largest_step, flips, radix, remainder_max, nibble,
            turn, decay,
        )  # fmt: skip


def _step_torch(
    packed: Tensor, remainder: Tensor, step_of: Callable[[slice], Tensor], key: Tensor, limit: int,
    flips: Tensor, radix: int, remainder_max: int, nibble: bool,
    turn: Tensor | None, decay: Tensor | None,
) -> None:  # fmt: skip
    in_features = remainder.shape[1]
    columns = torch.arange(in_features, dtype=torch.int32, device=packed.device)
    half = radix // 2
    for rows in row_chunks(remainder):
        state = remainder[rows]
        step = step_of(rows).clamp_(-limit, limit)
        random = random_halves(key, rows, columns, turn)
        old = unpack_trits_torch(packed[rows], in_features)
        low = state << 4 >> 4 if nibble else state
        if decay is not None:
            shrunk = low.to(torch.int32).add_(old, alpha=radix).mul_(int(decay))
            step.add_(shrunk.bitwise_right_shift_(8))
        step = random.sub_(step).bitwise_right_shift_(16)
        z = step.to(torch.int16)
        z += low
        z.add_(old, alpha=radix).clamp_(-radix - remainder_max, radix + remainder_max)
        # the sign bits of two differences: comparisons are slower
        new = (z + half).bitwise_right_shift_(15).sub_((half - z).bitwise_right_shift_(15))
        z.sub_(new, alpha=radix)
        new = new.to(torch.int8)
        if nibble:
            state.bitwise_and_(-16).bitwise_or_(z.bitwise_and_(15).to(torch.int8))
        else:
            state.copy_(z)
        packed[rows] = pack_trits_torch(new)
        flips += torch.count_nonzero(new.bitwise_xor_(old))


def _step_by_moment_native(
    packed: Tensor, remainder: Tensor, moment: Tensor | None, key: Tensor, turn: Tensor | None,
    step_size: Tensor, squares: Tensor, limit: Tensor, ok: Tensor, flips: Tensor, radix: int,
    remainder_max: int, decay: Tensor | None = None,
) -> None:  # fmt: skip
    if not _native_can(packed, remainder, moment):
        _step_by_moment_torch(
            packed, remainder, moment, key, turn, step_size, squares, limit, ok, flips, radix,
            remainder_max, decay,
        )  # fmt: skip
    elif ok:
        gain = moment_gain(step_size, squares, remainder.numel())
        _step_native(
            (None, None, None, 0, 0, 0, remainder.shape[1]), packed, remainder, moment,
            key, turn, gain, 0, limit, flips, radix, remainder_max, moment is None, decay,
        )  # fmt: skip


def _step_by_direction_native(
    packed: Tensor, remainder: Tensor, values: Tensor, row_gain: Tensor | None,
    column_gain: Tensor | None, key: Tensor, gain: Tensor, shift: Tensor, limit: Tensor, ok: Tensor,
    flips: Tensor, radix: int, remainder_max: int, decay: Tensor | None = None,
    turn: Tensor | None = None, nibble: bool = False,
) -> None:  # fmt: skip
    if not _native_can(packed, remainder):
        _step_by_direction_torch(
            packed, remainder, values, row_gain, column_gain, key, gain, shift, limit, ok, flips,
            radix, remainder_max, decay, turn, nibble,
        )  # fmt: skip
    elif ok:
        _step_native(
            native_arguments(values, row_gain, column_gain), packed, remainder, None,
            key, turn, gain, shift, limit, flips, radix, remainder_max, nibble, decay,
        )  # fmt: skip


def _native_can(*state: Tensor | None) -> bool:
    return all(part is None or native.has_dense_rows(part) for part in state)


def _step_native(
    direction: tuple[Tensor | int | None, ...],
    packed: Tensor, remainder: Tensor, moment: Tensor | None, key: Tensor, turn: Tensor | None,
    gain: Tensor | int, shift: Tensor | int, limit: Tensor, flips: Tensor, radix: int,
    remainder_max: int, nibble: bool, decay: Tensor | None,
) -> None:  # fmt: skip
    flips += native.call(
        "step_trits", *direction, packed, packed.stride(0), remainder, remainder.stride(0), moment,
        0 if moment is None else moment.stride(0), int(key), 0 if turn is None else int(turn),
        int(gain), int(shift), int(limit), 0 if decay is None else int(decay), radix,
        remainder_max, nibble, len(remainder), native.threads_for(remainder.numel()),
    )  # fmt: skip


@triton.jit
def _step_trits_kernel(
    packed_ptr, remainder_ptr, values_ptr, row_gain_ptr, column_gain_ptr,
    key_ptr, turn_ptr, gain_ptr, shift_ptr, squares_ptr, limit_ptr, ok_ptr, flips_ptr, decay_ptr,
    N, K, blocks, num_weights,
    stride_pn, stride_pb, stride_an, stride_ak, stride_vn, stride_vk, stride_rn,
    SOURCE: tl.constexpr, NIBBLE: tl.constexpr, TURNS: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, HAS_DECAY: tl.constexpr, RADIX: tl.constexpr,
    REMAINDER_MAX: tl.constexpr, CLIP: tl.constexpr, MAX_GAIN: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Step pairs of rows in one block of 160 columns; `SOURCE` is moment or direction."""
    if tl.load(ok_ptr) == 0:
        return
    # scalars of the step, the same for all programs
    gain, shift = _gain(gain_ptr, shift_ptr, squares_ptr, num_weights, SOURCE, MAX_GAIN)
    key, limit = tl.load(key_ptr), tl.load(limit_ptr)
    turn = tl.load(turn_ptr).to(tl.uint32) if TURNS else 0
    decay = tl.load(decay_ptr) if HAS_DECAY else 0
    # a program has BLOCK_P pairs of rows of a block: 32 bytes of five planes
    block = tl.program_id(0) % blocks
    first = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_P
    width = (K - block * 160 + 4) // 5  # of a plane; the last block may be short
    if width >= 32:
        flips = _step_block(
            packed_ptr, remainder_ptr, values_ptr, row_gain_ptr, column_gain_ptr,
            key, turn, gain, shift, limit, decay, first, block, 32, N, K,
            stride_pn, stride_pb, stride_an, stride_ak, stride_vn, stride_vk, stride_rn,
            SOURCE, NIBBLE, TURNS, HAS_ROWS, HAS_COLUMNS, HAS_DECAY, RADIX, REMAINDER_MAX, CLIP,
            BLOCK_P, 1,
        )  # fmt: skip
    else:  # any width, so loads are bytes; with a quarter of the rows at once no register spills
        flips = _step_block(
            packed_ptr, remainder_ptr, values_ptr, row_gain_ptr, column_gain_ptr,
            key, turn, gain, shift, limit, decay, first, block, width, N, K,
            stride_pn, stride_pb, stride_an, stride_ak, stride_vn, stride_vk, stride_rn,
            SOURCE, NIBBLE, TURNS, HAS_ROWS, HAS_COLUMNS, HAS_DECAY, RADIX, REMAINDER_MAX, CLIP,
            BLOCK_P // 4, 4,
        )  # fmt: skip
    tl.atomic_add(flips_ptr, flips)


@triton.jit
def _gain(
    gain_ptr, shift_ptr, squares_ptr, num_weights, SOURCE: tl.constexpr, MAX_GAIN: tl.constexpr
):
    if SOURCE == "direction":
        return tl.load(gain_ptr), tl.load(shift_ptr)
    # the moment is brought to unit root-mean-square: see `moment_gain`
    mean_square = tl.div_rn(tl.load(squares_ptr).to(tl.float32), num_weights)
    step_size = tl.load(gain_ptr).to(tl.float32) * 0.0000152587890625  # 2**-16
    gain = tl.div_rn(step_size, tl.sqrt_rn(mean_square))
    return tl.floor(tl.minimum(gain, MAX_GAIN) + 0.5).to(tl.int32), 0


@triton.jit
def _step_block(
    packed_ptr, remainder_ptr, values_ptr, row_gain_ptr, column_gain_ptr,
    key, turn, gain, shift, limit, decay, first, block, width, N, K,
    stride_pn, stride_pb, stride_an, stride_ak, stride_vn, stride_vk, stride_rn,
    SOURCE: tl.constexpr, NIBBLE: tl.constexpr, TURNS: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, HAS_DECAY: tl.constexpr, RADIX: tl.constexpr,
    REMAINDER_MAX: tl.constexpr, CLIP: tl.constexpr, BLOCK_P: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Step pairs of rows, from the pair `first` on, in one block of columns; count the flips.

    Digits are read most significant first: with `left` the fraction of byte / 243, the digit is the
    integer part of 3 * left, and its fraction the new `left`. The new byte is built in this order.
    """
    j = tl.arange(0, 32)[None, :]
    mask_j = j < width
    flips = tl.zeros((BLOCK_P, 32), dtype=tl.int32)
    for step in range(STEPS):
        pair = (first + step * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
        even, odd = 2 * pair, 2 * pair + 1
        even_bytes = packed_ptr + even * stride_pn + (block * 32 + j) * stride_pb
        odd_bytes = packed_ptr + odd * stride_pn + (block * 32 + j) * stride_pb
        # byte / 243 in units of 2**-32, rounded up
        even_left = tl.load(even_bytes, mask=(even < N) & mask_j, other=0).to(tl.uint32) * 17674763
        odd_left = tl.load(odd_bytes, mask=(odd < N) & mask_j, other=0).to(tl.uint32) * 17674763
        even_byte = tl.zeros((BLOCK_P, 32), dtype=tl.int32)
        odd_byte = tl.zeros((BLOCK_P, 32), dtype=tl.int32)
        for plane in range(5):
            k = block * 160 + width * (4 - plane) + j
            mask_k = mask_j & (k < K)
            # direction of the plane, and the bytes with its remainders
            even_u, even_state = _load_tile(
                remainder_ptr, values_ptr, row_gain_ptr, column_gain_ptr, even, k, N, mask_k,
                stride_an, stride_ak, stride_vn, stride_vk, stride_rn,
                SOURCE, NIBBLE, HAS_ROWS, HAS_COLUMNS, CLIP,
            )  # fmt: skip
            odd_u, odd_state = _load_tile(
                remainder_ptr, values_ptr, row_gain_ptr, column_gain_ptr, odd, k, N, mask_k,
                stride_an, stride_ak, stride_vn, stride_vk, stride_rn,
                SOURCE, NIBBLE, HAS_ROWS, HAS_COLUMNS, CLIP,
            )  # fmt: skip
            # one word of random bits serves two rows
            words = random_words(key, pair, k)
            even_random, odd_random = words & 0xFFFF, words >> 16
            if TURNS:
                even_random = (even_random + turn) & 0xFFFF
                odd_random = (odd_random + turn) & 0xFFFF
            # the next trit of each byte
            even_thrice, odd_thrice = even_left.to(tl.uint64) * 3, odd_left.to(tl.uint64) * 3
            even_left, odd_left = even_thrice.to(tl.uint32), odd_thrice.to(tl.uint32)
            even_old, odd_old = (even_thrice >> 32).to(tl.int32), (odd_thrice >> 32).to(tl.int32)
            # step trit and remainder together, as one number
            even_new, even_low = _step(
                even_old, even_state, even_u, even_random, gain, shift, limit, decay,
                SOURCE, NIBBLE, HAS_DECAY, RADIX, REMAINDER_MAX,
            )  # fmt: skip
            odd_new, odd_low = _step(
                odd_old, odd_state, odd_u, odd_random, gain, shift, limit, decay,
                SOURCE, NIBBLE, HAS_DECAY, RADIX, REMAINDER_MAX,
            )  # fmt: skip
            # store the remainders, and append the new trits to the bytes
            even_ptrs = remainder_ptr + even * stride_an + k * stride_ak
            odd_ptrs = remainder_ptr + odd * stride_an + k * stride_ak
            tl.store(even_ptrs, even_low.to(tl.int8), mask=(even < N) & mask_k)
            tl.store(odd_ptrs, odd_low.to(tl.int8), mask=(odd < N) & mask_k)
            even_byte, odd_byte = even_byte * 3 + even_new, odd_byte * 3 + odd_new
            flips += (even_new != even_old).to(tl.int32) + (odd_new != odd_old).to(tl.int32)
        tl.store(even_bytes, even_byte.to(tl.uint8), mask=(even < N) & mask_j)
        tl.store(odd_bytes, odd_byte.to(tl.uint8), mask=(odd < N) & mask_j)
    return tl.sum(flips).to(tl.int64)


@triton.jit
def _load_tile(
    remainder_ptr, values_ptr, row_gain_ptr, column_gain_ptr, n, k, N, mask_k,
    stride_an, stride_ak, stride_vn, stride_vk, stride_rn,
    SOURCE: tl.constexpr, NIBBLE: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    CLIP: tl.constexpr,
):  # fmt: skip
    """Load u, and the bytes with A, of some weights as int32; zeros where masked."""
    mask_n = n < N
    mask = mask_n & mask_k
    state = tl.load(remainder_ptr + n * stride_an + k * stride_ak, mask=mask, other=0).to(tl.int32)
    if NIBBLE and SOURCE == "moment":
        return state >> 4, state
    u = tl.load(values_ptr + n * stride_vn + k * stride_vk, mask=mask, other=0)
    if SOURCE == "direction":
        row_gain = load_gain(row_gain_ptr, n * stride_rn, mask_n, HAS_ROWS)
        u = fixed_point(
            u, row_gain, load_gain(column_gain_ptr, k, mask_k, HAS_COLUMNS), CLIP, HAS_ROWS
        )
    return u.to(tl.int32), state


@triton.jit
def _step(
    old, state, u, random, gain, shift, limit, decay,
    SOURCE: tl.constexpr, NIBBLE: tl.constexpr, HAS_DECAY: tl.constexpr, RADIX: tl.constexpr,
    REMAINDER_MAX: tl.constexpr,
):  # fmt: skip
    """Step weights and return both digits; trits are 0, 1, 2 here, and so z is P more."""
    # step in units of 2**-16 of z, clipped; weight decay is not
    step = u * gain
    if SOURCE == "direction":
        step = step >> shift
    step = tl.minimum(tl.maximum(step, -limit), limit)
    low = (state << 28) >> 28 if NIBBLE else state
    if HAS_DECAY:
        step += (((old - 1) * RADIX + low) * decay) >> 8
    # z minus the step, rounded stochastically: random bits below the unit, then a floor
    z = old * (RADIX << 16) + (low << 16) - step + random.to(tl.int32)
    # clipped before the shift, as an addition and a maximum are one instruction
    HIGHEST: tl.constexpr = ((2 * RADIX + REMAINDER_MAX) << 16) + 0xFFFF
    z = tl.minimum(tl.maximum(z, -REMAINDER_MAX << 16), HIGHEST) >> 16
    # carry: the new trit counts the thresholds that z reaches, by sign bits of differences
    new = 2 + ((z - RADIX - RADIX // 2 - 1) >> 31) + ((z - RADIX // 2) >> 31)
    low = z - new * RADIX
    if NIBBLE:
        low = (state & -16) | (low & 15)
    return new, low


def _launch(
    packed: Tensor, remainder: Tensor, source: str, values: Tensor, row_gain: Tensor | None,
    column_gain: Tensor | None, key: Tensor, turn: Tensor | None, gain: Tensor, shift: Tensor,
    squares: Tensor, limit: Tensor, ok: Tensor, flips: Tensor, radix: int, remainder_max: int,
    nibble: bool, decay: Tensor | None,
) -> None:  # fmt: skip
    if not remainder.numel():
        return
    rows, columns = remainder.shape
    has_rows, has_columns = row_gain is not None, column_gain is not None
    blocks, block_p = triton.cdiv(columns, BLOCK), 16
    _step_trits_kernel[(triton.cdiv(rows, 2 * block_p) * blocks,)](
        packed, remainder, values, row_gain if has_rows else values,
        column_gain if has_columns else values, key, key if turn is None else turn, gain, shift,
        squares, limit, ok, flips, limit if decay is None else decay,
        rows, columns, blocks, float(rows * columns),
        *packed.stride(), *remainder.stride(), *values.stride(),
        0 if row_gain is None else row_gain.stride(0),
        SOURCE=source, NIBBLE=nibble, TURNS=turn is not None, HAS_ROWS=has_rows,
        HAS_COLUMNS=has_columns, HAS_DECAY=decay is not None, RADIX=radix,
        REMAINDER_MAX=remainder_max, CLIP=CLIP, MAX_GAIN=MAX_GAIN, BLOCK_P=block_p,
        enable_fp_fusion=False, maxnreg=registers_of(remainder),
    )  # fmt: skip


def _step_by_moment_triton(
    packed: Tensor, remainder: Tensor, moment: Tensor | None, key: Tensor, turn: Tensor | None,
    step_size: Tensor, squares: Tensor, limit: Tensor, ok: Tensor, flips: Tensor, radix: int,
    remainder_max: int, decay: Tensor | None = None,
) -> None:  # fmt: skip
    values = remainder if moment is None else moment
    _launch(
        packed, remainder, "moment", values, None, None, key, turn, step_size, step_size, squares,
        limit, ok, flips, radix, remainder_max, moment is None, decay,
    )  # fmt: skip


def _step_by_direction_triton(
    packed: Tensor, remainder: Tensor, values: Tensor, row_gain: Tensor | None,
    column_gain: Tensor | None, key: Tensor, gain: Tensor, shift: Tensor, limit: Tensor, ok: Tensor,
    flips: Tensor, radix: int, remainder_max: int, decay: Tensor | None = None,
    turn: Tensor | None = None, nibble: bool = False,
) -> None:  # fmt: skip
    _launch(
        packed, remainder, "direction", values, row_gain, column_gain, key, turn, gain, shift, gain,
        limit, ok, flips, radix, remainder_max, nibble, decay,
    )  # fmt: skip


step_by_moment = Operation(
    "step_by_moment", _step_by_moment_triton, _step_by_moment_torch,
    "packed: uint8[N, row_bytes(K)]; remainder: int8[N, K]; moment: int8[N, K]?; key: int32[]; "
    "turn: int32[]?; step_size, squares: int64[]; limit, ok: int32[]; flips: int64[]; radix; "
    "remainder_max; decay: int32[]?",
    native=_step_by_moment_native,
)  # fmt: skip
"""Step a matrix of weights by its moment, in place, carrying between trit and remainder.

Args:
    packed: (N, row_bytes(K)) uint8, the trits T.
    remainder: (N, K) int8, A; with no `moment`, bytes of 16 m + (A mod 16).
    moment: (N, K) int8, m; None for the high half of the remainder's bytes.
    key: int32 scalar tensor, from `stream_keys`.
    turn: int32 scalar tensor, 0..65535, the offset of the random bits; None for 0.
    step_size: int64 scalar tensor, the step of z at unit root-mean-square, in units of 2**-32.
    squares: int64 scalar tensor, the sum of m squared over the matrix.
    limit: int32 scalar tensor, the largest |d|, in units of 2**-16 of z.
    ok: int32 scalar tensor; if 0, nothing changes.
    flips: int64 scalar tensor; the number of trits that changed is added to it.
    radix: P, the value of a trit in units of A.
    remainder_max: z is clipped to +-(P + remainder_max).
    decay: int32 scalar tensor, 0..`MAX_DECAY`, the decay of z in units of 2**-24; None for no
        decay.
"""
step_by_direction = Operation(
    "step_by_direction", _step_by_direction_triton, _step_by_direction_torch,
    "packed: uint8[N, row_bytes(K)]; remainder: int8[N, K]; values: real[N, K]; "
    "row_gain: float32[N]?; column_gain: float32[K]? dense; key, gain, shift, limit, ok: int32[]; "
    "flips: int64[]; radix; remainder_max; decay, turn: int32[]?; nibble",
    native=_step_by_direction_native, where=(GAINS_BELONG,),
)  # fmt: skip
"""Step a matrix of weights along a direction, in place, carrying between trit and remainder.

Args:
    packed: (N, row_bytes(K)) uint8, the trits T.
    remainder: (N, K) int8, A; with `nibble`, bytes of 16 m + (A mod 16).
    values: (N, K) float32 or bfloat16, any strides.
    row_gain: (N,) float32; u = values * row_gain * column_gain in units of 2**-16, saturating
        at +-4. None for the sign of the values.
    column_gain: (K,) float32; None for ones.
    key: int32 scalar tensor, from `stream_keys`.
    gain: int32 scalar tensor, at most 2**12.
    shift: int32 scalar tensor; d = (u * gain) >> shift, in units of 2**-16 of z.
    limit: int32 scalar tensor, the largest |d|.
    ok: int32 scalar tensor; if 0, nothing changes.
    flips: int64 scalar tensor; the number of trits that changed is added to it.
    radix: P, the value of a trit in units of A.
    remainder_max: z is clipped to +-(P + remainder_max).
    decay: int32 scalar tensor, 0..`MAX_DECAY`, the decay of z in units of 2**-24; None for no
        decay.
    turn: int32 scalar tensor, 0..65535, the offset of the random bits; None for 0.
    nibble: whether the remainder is the low half of its byte, whose high half is kept.
"""

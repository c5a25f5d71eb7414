"""Products of few rows, with norm, gate and sum fused in: y = added + gate(rms_norm(x) @ w.T).

rms_norm(x) = x / sqrt(mean(x**2) + eps) has no weights; gate(a, b) = silu(a) * b, with a and b the
two halves of a row of the product. Norm, gate and sum can each be left out. The norm's division is
done last, on the products: the squares are summed while the matrix is read.

Layout. The trits are *arranged* in pieces of 16 rows by 160 columns, stored in the order in which
the threads of a warp load them. Incomplete pieces are padded with zeros.

- 512 bytes of trits, five to a byte as `packing` says. For c in 0..3 and r in 0..7: bytes
  8 c .. 8 c + 7 of row r of the piece, then the same bytes of row r + 8.
- 160 bytes of scales, bf16, each halved. For r in 0..7: digits 0, 1, 2, 3 of rows r and r + 8; then
  for r in 0..7: digit 4 of rows r and r + 8. Scales of even digits are negative, because
  `take_digits` gives -2 T for even digits and 2 T for odd ones.

If the result is gated, row r + 8 of a piece is the row of w half a matrix below row r, so that one
thread has both inputs of the gate.

Work. As in `few_rows`, thread 4 r + c of a warp multiplies bytes 8 c .. 8 c + 7 of rows r and
r + 8. Pieces and the x they meet are copied to shared memory some steps ahead of the arithmetic,
those of the first steps before the kernel waits for the one that makes x.

The matrix instruction has room for eight rows of x. With up to four rows that room is used for
several blocks *abreast*: two blocks, or four for a single row. A thread then takes half of a block,
or all of it, and x is 0 in the columns of y that belong to another block. For one or two rows this
leaves two columns each, and digits need not be separated at all: prefixes of them are multiplied,
in one column by the x of their last digit and in the other by the x of the digit that follows it;
see `prefixes` and `_of_digit`.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.codec.packing import PLANE, pack_trits, unpack_trits, unpack_trits_torch
from arbcli.kernels.codec.scales import scales_torch
from arbcli.kernels.codec.warp_products import (
    HAS_PTX,
    add_products,
    add_scaled,
    centre,
    prefixes,
    spread,
    take_digits,
    unpair,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import num_processors, uses_triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.shared_memory import (
    allocate,
    commit,
    copy,
    read,
    read_four,
    read_four_where,
    wait_for_copies,
    wait_for_warp,
    write_four,
)
from arbcli.kernels.runtime.spec import MATRIX, Case, Gate, KernelSpec, Timing

BLOCK = 5 * PLANE
"""Weights of a row in a piece."""
ROWS = 16
"""Rows of a piece."""
TRIT_BYTES, SCALE_BYTES = 512, 160
"""Of a piece."""
MOST_ROWS = 8
"""Largest M: what one instruction multiplies."""
SHARED_BYTES = 47 << 10
"""That a program can have, but for what sums over its threads take."""
PIECE_BYTES = tl.constexpr(TRIT_BYTES + SCALE_BYTES)
SCALES_AT = tl.constexpr(TRIT_BYTES)
"""Bytes of a piece, and where its scales are."""
MOST_AT_ONCE = tl.constexpr(32)
"""Words of x that a thread has loads of under way to square; more take too many registers."""
_X_BLOCK = tl.constexpr(2 * BLOCK)
"""Bytes of a row of x that a piece multiplies."""


class Arranged(NamedTuple):
    """A matrix in pieces: T tiles of 16 rows by B blocks of 160 columns."""

    pieces: Tensor
    """(T, B, 672) uint8: (4, 8, 2, 8) bytes, then (8, 4, 2) and (8, 2) bfloat16 scales."""
    out_features: int
    """N: elements of a result, after gating."""
    in_features: int
    """K."""
    gated: bool
    """Whether a tile has eight rows of each half of the matrix."""


def arrange(packed: Packed, gated: bool = False) -> Arranged:
    """Arrange a packed matrix: 2.1 bits a weight, and what fills the last pieces.

    Args:
        packed: N rows by K weights, in groups of a multiple of 32.
        gated: whether results are to be gated; then N is even.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    packed.check()
    in_features, device = packed.in_features, packed.trits.device
    if packed.remainder is not None:
        raise ValueError("weights of all digits are arranged by `arrange_digits`")
    if packed.group_size % PLANE:
        raise ValueError(f"need groups of whole planes of {PLANE} weights, got {packed.group_size}")
    half, odd = divmod(packed.out_features, 2)
    if gated and odd:
        raise ValueError(f"{packed.out_features} rows are not two halves")
    trits = unpack_trits(packed.trits, in_features)
    blocks = -(-in_features // BLOCK)
    group = torch.arange(5 * blocks, device=device) * PLANE // packed.group_size
    group = group.clamp(max=packed.num_groups - 1)
    scales = scales_torch(packed.exponent, packed.fraction)[:, group]
    halves = trits.view(2, half, -1) if gated else trits[None]
    of_halves = scales.view(2, half, -1) if gated else scales[None]
    rows = halves.shape[1]
    missing = -rows % (ROWS // 2 if gated else ROWS)
    halves = functional.pad(halves, (0, BLOCK * blocks - in_features, 0, missing))
    of_halves = functional.pad(of_halves, (0, 0, 0, missing))
    # to (tile, i, r, ...): i = 0 is row r of a tile, i = 1 row r + 8, or the gate's other input
    order = (1, 0, 2, 3, 4, 5) if gated else (0, 1, 2, 3, 4, 5)
    split = (2, -1, 8) if gated else (-1, 2, 8)
    pieces = pack_trits(halves.flatten(0, 1)).view(*split, blocks, 4, 8).permute(order)
    of_planes = of_halves.reshape(*split, blocks, 5).permute(order[:5])
    sign = torch.tensor([-0.5, 0.5, -0.5, 0.5, -0.5], device=device)
    pieces = pieces.permute(0, 3, 4, 2, 1, 5).flatten(2)
    of_planes = (of_planes * sign).permute(0, 3, 2, 4, 1).to(torch.bfloat16)
    first, last = (part.flatten(2).view(torch.uint8) for part in of_planes.split([4, 1], dim=3))
    pieces = torch.cat([pieces, first, last], dim=2)
    # a kernel that overlaps the one before it reads the pieces without waiting for any kernel
    if pieces.is_cuda:
        torch.cuda.synchronize(pieces.device)
    return Arranged(pieces, rows, in_features, gated)


def fits_arranged(x: Tensor, group_size: int) -> bool:
    """Whether a step should arrange its weights: bf16, kernels, groups of whole planes.

    Args:
        x: the stream, (B, 1, K) of one position of each text.
        group_size: of the weights.
    """
    step = x.dtype == torch.bfloat16 and x.shape[1] == 1 and x.shape[2] % 8 == 0
    return step and uses_triton(x) and group_size % PLANE == 0 and torch.version.hip is None


def arranged_matmul_reference(
    x: Tensor,
    pieces: Tensor,
    out_features: int,
    in_features: int,
    gated: bool,
    eps: float | None,
    added: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what `arranged_matmul` must return, in float64, one piece at a time."""
    tiles, blocks = pieces.shape[:2]
    trits = pieces[..., :TRIT_BYTES].unflatten(2, (4, 8, 2, 8))
    scales = pieces[..., TRIT_BYTES:].contiguous().view(torch.bfloat16).unflatten(2, (40, 2))
    weight = torch.zeros(tiles, 2, 8, BLOCK * blocks, dtype=torch.float64, device=x.device)
    for b in range(blocks):
        for r in range(8):
            for c in range(4):
                for digit in range(5):
                    k = BLOCK * b + PLANE * digit + 8 * c
                    trit = trits[:, b, c, r].long() // 3**digit % 3 - 1  # (T, 2, 8)
                    scale = scales[:, b, 4 * r + digit if digit < 4 else 32 + r].double()
                    scale = scale * (2 if digit % 2 else -2)
                    weight[:, :, r, k : k + 8] = trit * scale[:, :, None]
    x = x.double()
    if eps is not None:
        x = x / ((x * x).sum(1, keepdim=True) / in_features + eps) ** 0.5
    y = torch.einsum("thrk,mk->mthr", weight[..., :in_features], x)
    if gated:
        y = y[:, :, 0] / (1 + torch.exp(-y[:, :, 0])) * y[:, :, 1]
    y = y.flatten(1)[:, :out_features]
    return y if added is None else added.double() + y


def decode_arranged(pieces: Tensor) -> Tensor:
    """Decode an arranged matrix: (16 T, 160 B) float32, in the order of its tiles."""
    blocks = pieces.shape[1]
    trits, scales = pieces.split([TRIT_BYTES, SCALE_BYTES], dim=2)
    scales = scales.contiguous().view(torch.bfloat16).unflatten(2, (40, 2))
    scales = torch.cat([scales[:, :, :32].unflatten(2, (8, 4)), scales[:, :, 32:, None]], dim=3)
    packed = trits.unflatten(2, (4, 8, 2, 8)).permute(0, 4, 3, 1, 2, 5)
    weight = unpack_trits_torch(
        packed.reshape(ROWS * len(pieces), -1), BLOCK * blocks, torch.float32
    )
    sign = torch.tensor([-2.0, 2.0, -2.0, 2.0, -2.0], device=pieces.device)
    of_planes = scales.permute(0, 4, 2, 1, 3).float() * sign
    return (weight.unflatten(1, (-1, PLANE)) * of_planes.reshape(len(weight), -1, 1)).flatten(1)


def _arranged_matmul_torch(x, pieces, out_features, in_features, gated, eps, added, dtype):
    weight, x = decode_arranged(pieces), x.float()
    if eps is not None:
        x = functional.rms_norm(x, x.shape[1:], eps=eps)
    y = (x @ weight[:, :in_features].T).view(len(x), -1, 2, 8)
    if gated:
        y = functional.silu(y[:, :, 0]) * y[:, :, 1]
    y = y.flatten(1)[:, :out_features]
    return (y if added is None else added + y).to(dtype)


@triton.jit
def copy_pieces(starts, slot, block, blocks, ABREAST: tl.constexpr):
    """Start copying the next `ABREAST` pieces of each tile, from `block` on, to shared memory."""
    UNITS: tl.constexpr = PIECE_BYTES // 16 * ABREAST
    lane = tl.arange(0, block.shape[0]) % 32
    left = PIECE_BYTES // 16 * (blocks - block) - lane
    for i in tl.static_range(len(starts)):
        source = (starts[i] + (PIECE_BYTES // 8 * block + 2 * lane)).to(tl.int64)
        target = slot + 16 * (UNITS * i + lane)
        for j in tl.static_range(0, UNITS, 32):
            copy(target + 16 * j, source + 16 * j, left > j, lane + j < UNITS, False)


@triton.constexpr_function
def _x_stride(abreast):
    """Choose the stride of blocks of x in shared memory; padding avoids bank conflicts."""
    return 2 * BLOCK + (16 if abreast > 1 else 0)


@triton.jit
def _copy_x(x_ptr, slot, block, K, ABREAST: tl.constexpr, M: tl.constexpr):
    """Start copying the blocks of x that these pieces multiply, padded with zeros beyond K."""
    UNITS: tl.constexpr = _X_BLOCK // 16 * ABREAST
    LANES: tl.constexpr = 32 if M == 1 else 16 if M == 2 else 8 if M <= 4 else 4  # of a row
    PADDING: tl.constexpr = _x_stride(ABREAST) - _X_BLOCK
    lane = tl.arange(0, block.shape[0]) % 32
    m, i = lane // LANES, lane % LANES
    source = (x_ptr + (tl.minimum(m, M - 1) * (K // 4) + 40 * block + 2 * i)).to(tl.int64)
    target = slot + _x_stride(ABREAST) * ABREAST * m
    left = K - 160 * block - 8 * i
    for j in tl.static_range(0, UNITS, LANES):
        some = (m < M) & (i + j < UNITS)
        at = 16 * (i + j) + PADDING * ((i + j) // (_X_BLOCK // 16))
        copy(target + at, source + 16 * j, left > 8 * j, some, True)


@triton.jit
def split_word(word):
    """Split an int64 into two int32."""
    return word.to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def sum_of_squares(word):
    """Add up the squares of the four bf16 elements of an int64."""
    a, b = split_word(word)
    total = tl.zeros(word.shape, tl.float32)
    for i in tl.static_range(2):
        low, high = unpair(a if i == 0 else b)
        total += low * low + high * high
    return total


@triton.jit
def _squares_of(x_row, at, K):
    """Add up the squares of the four elements of a row in each word `at`."""
    return sum_of_squares(tl.load(x_row + at, mask=4 * at < K, other=0))


@triton.jit
def read_unit(pointer, address, PTX: tl.constexpr):
    """Read a thread's eight bytes of rows r and r + 8: four int32."""
    if PTX:
        return read_four(address)
    return split_word(tl.load(pointer)) + split_word(tl.load(pointer + 1))


@triton.jit
def _read_x(pointer, address, left, own, old, PTX: tl.constexpr):
    """Read eight elements of x where `own`; elsewhere keep `old`, which is 0.

    A column of y is of one block: other blocks must not add to it, so they read zeros.
    """
    if PTX:
        return read_four_where(address, own, old)
    some = own & (left > 0)
    return split_word(tl.load(pointer, some, 0)) + split_word(tl.load(pointer + 1, some, 0))


@triton.jit
def read_scales(piece, r, address, last_address, PTX: tl.constexpr):
    """Read the scales of rows r and r + 8, a pair a digit."""
    if PTX:
        return read_four(address) + (read(last_address),)  # noqa: RUF005
    word, pairs = (piece + SCALES_AT // 8).to(tl.pointer_type(tl.int32)), ()
    for digit in tl.static_range(5):
        pairs = pairs + (tl.load(word + (4 * r + digit if digit < 4 else 32 + r)),)  # noqa: RUF005
    return pairs


@triton.jit
def _total_planes(x_row, x_at, x_late_at, left, late, c, PTX: tl.constexpr):
    """Sum the elements of x in each of the five planes of a thread's block, by products with 1.

    `_of_digit` needs these sums to undo the offset of 3 that prefixes have.
    """
    ones = (tl.full(c.shape, 0x3F803F80, tl.int32),) * 8
    zero, totals = tl.zeros_like(c), ()
    nothing = (zero, zero, zero, zero)
    for i in tl.static_range(3):  # planes 0 and 1 side by side in two columns, 2 and 3, then 4
        k = 8 * c + 32 * (2 * i + (late if i < 2 else 0))
        address = (x_late_at if i < 2 else x_at) + 128 * i
        eight = _read_x(x_row + k // 4, address, left - k, c >= 0, nothing, PTX)
        sums = add_products((0.0, 0.0, 0.0, 0.0), ones, eight, PTX)
        totals = totals + (sums[0], sums[1])  # noqa: RUF005
    return totals


@triton.jit
def _of_digit(products, totals, digit: tl.constexpr):
    """Find the sums of T x of one digit in rows r and r + 8, from sums of prefixes times x.

    T_d = p_d - 3 p_(d+1), so a digit's sum is that of its own prefix minus three times that of the
    prefix that is one digit shorter, with the same x. `prefixes` gives 3 + p / 64 and not p / 64:
    what both sums contain of the plain sum of x, `totals`, is subtracted.

    Returns:
        Two sums in units of 1 / 64, with the sign of T for odd digits and of -T for even ones.
    """
    MORE: tl.constexpr = (9, -6, 6, -6, -3)[digit]
    found = ()
    for row in tl.static_range(2):
        y = products[digit][2 * row] - MORE * totals[digit]
        if digit < 4:  # the shorter prefix has the opposite sign
            y += 3 * products[digit + 1][2 * row + 1]
        found = found + (y,)  # noqa: RUF005
    return found


@triton.jit
def _add_pieces(
    sums, x, starts, slot, x_ptr, block, blocks, K,
    M: tl.constexpr, ABREAST: tl.constexpr, PREFIXES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of `ABREAST` pieces of each tile, which are what a warp does in one step.

    A column of the matrix instruction belongs to one row m of x and to one of the blocks. With
    `PREFIXES` there are two columns for each pair: one multiplies a prefix by the x of its last
    digit, the other, `late`, by the x of the digit after it. `x` is a ring of registers that are 0
    in threads whose bytes are of another block than their column.
    """
    HEIGHT: tl.constexpr = len(starts)
    thread = tl.arange(0, block.shape[0])
    r, c = thread // 4 % 8, thread % 4
    column, late = (r // 2, r % 2) if PREFIXES else (r, 0)
    COLUMNS: tl.constexpr = (4 if PREFIXES else 8) // ABREAST  # of a block
    theirs, m = column // COLUMNS, tl.minimum(column % COLUMNS, M - 1)
    mine, unit = c * ABREAST // 4, c % (4 // ABREAST) * ABREAST
    own = mine == theirs if ABREAST > 1 else r >= 0
    x_row = x_ptr + (m * (K // 4) + 40 * (block + theirs))
    left = K - 160 * (block + theirs)
    pieces = ()
    for i in tl.static_range(HEIGHT):
        piece = starts[i] + PIECE_BYTES // 8 * tl.minimum(block + mine, blocks - 1)
        pieces = pieces + (piece,)  # noqa: RUF005

    # addresses: the part that depends on the thread is summed once, the rest are constants
    bytes_at = slot + (PIECE_BYTES * mine + 128 * unit + 16 * r)
    scales_at = slot + (PIECE_BYTES * mine + SCALES_AT + 16 * r)
    last_scale_at = slot + (PIECE_BYTES * mine + SCALES_AT + 128 + 4 * r)
    x_lane = PIECE_BYTES * ABREAST * HEIGHT + _x_stride(ABREAST) * (ABREAST * m + theirs)
    x_at = slot + (x_lane + 16 * unit)
    x_late_at = slot + (x_lane + 16 * unit - 64 * late)

    totals = ()
    if PREFIXES:
        planes_at = slot + (x_lane + 16 * c)
        late_planes_at = slot + (x_lane + 16 * c + 64 * late)
        totals = _total_planes(x_row, planes_at, late_planes_at, left, late, c, PTX)
    products = (((0.0, 0.0, 0.0, 0.0),) * 5,) * HEIGHT
    for j in tl.static_range(ABREAST):
        bytes_, scales = (), ()
        for i in tl.static_range(HEIGHT):
            pointer, offset = pieces[i] + 16 * (unit + j) + 2 * r, PIECE_BYTES * ABREAST * i
            words = read_unit(pointer, bytes_at + (offset + 128 * j), PTX)
            for k in tl.static_range(4):
                bytes_ = bytes_ + (centre(words[k], PTX) if PREFIXES else spread(words[k], PTX))
            if j == ABREAST - 1:
                first, last = scales_at + offset, last_scale_at + offset
                scales = scales + (read_scales(pieces[i], r, first, last, PTX),)  # noqa: RUF005
        for digit in tl.static_range(4, -1, -1):
            plane = digit - (late if digit > 0 else 0)
            k = 8 * (unit + j) + 32 * plane
            address = (x_late_at if digit > 0 else x_at) + (16 * j + 64 * digit)
            eight = _read_x(x_row + k // 4, address, left - k, own, x[0], PTX)
            if ABREAST > 1:
                x = x[1:] + (eight,)  # noqa: RUF005
            if PREFIXES:
                pairs = prefixes(bytes_, digit, PTX)
            else:
                pairs, bytes_ = take_digits(bytes_, digit, PTX)
            for i in tl.static_range(HEIGHT):
                of_tile = products[i]
                added = add_products(of_tile[digit], pairs[8 * i : 8 * i + 8], eight, PTX)
                of_tile = of_tile[:digit] + (added,) + of_tile[digit + 1 :]  # noqa: RUF005
                products = products[:i] + (of_tile,) + products[i + 1 :]  # noqa: RUF005
                if j == ABREAST - 1:
                    upper, lower = unpair(scales[i][digit])
                    y = _of_digit(of_tile, totals, digit) if PREFIXES else added
                    sums = sums[:i] + (add_scaled(sums[i], y, upper, lower),) + sums[i + 1 :]  # noqa: RUF005
    return sums, x


@triton.jit
def over_parts(value, THREADS: tl.constexpr, PARTS: tl.constexpr):
    """Split each `THREADS` threads into `PARTS` parts, sum over these, and give all the sum."""
    if PARTS == 1:
        return value
    shape: tl.constexpr = (value.shape[0] // THREADS, PARTS, THREADS // PARTS)
    total = tl.sum(tl.reshape(value, shape), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, shape), value.shape)


@triton.jit
def _over_warps(sums, memory, apart, PTX: tl.constexpr):
    """Sum over warps the four sums that a thread has of each tile; warp i returns those of tile i.

    A warp writes 512 bytes a tile to shared memory from `memory` on, `apart` bytes from those of
    the next warp.
    """
    WARPS: tl.constexpr = memory.shape[0] // 32
    HEIGHT: tl.constexpr = len(sums)
    tl.static_assert(HEIGHT <= WARPS)
    thread = tl.arange(0, memory.shape[0])
    warp, at = thread // 32, memory + 16 * (thread % 32)
    found = (tl.zeros(thread.shape, tl.float32),) * 4
    if PTX:
        wait_for_warp(thread)
        for i in tl.static_range(HEIGHT):
            write_four(at + 512 * i, as_words(sums[i]))
        tl.debug_barrier()
        first, zero = at - apart * warp + 512 * warp, tl.zeros_like(thread)
        for w in tl.static_range(WARPS):
            four = read_four_where(first + apart * w, warp < HEIGHT, (zero, zero, zero, zero))
            found = _add_bits(found, four)
    else:
        for i in tl.static_range(HEIGHT):
            for j in tl.static_range(4):
                total = over_parts(sums[i][j], 32 * WARPS, WARPS)
                total = tl.where(warp == i, total, found[j])
                found = found[:j] + (total,) + found[j + 1 :]  # noqa: RUF005
    return found


@triton.jit
def as_words(four):
    """Read four float32 as int32, bit by bit."""
    words = ()
    for i in tl.static_range(4):
        words = words + (four[i].to(tl.int32, bitcast=True),)  # noqa: RUF005
    return words


@triton.jit
def _add_bits(four, words):
    total = ()
    for i in tl.static_range(4):
        total = total + (four[i] + words[i].to(tl.float32, bitcast=True),)  # noqa: RUF005
    return total


@triton.jit
def _store(y, added_ptr, y_ptr, at, mask, ADD: tl.constexpr):
    if ADD:
        y += tl.load(added_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_both(
    upper, lower, added_ptr, y_ptr, m, n, N, mask, GATED: tl.constexpr, ADD: tl.constexpr
):
    """Store the results of rows r and r + 8 of a tile: one if they are gated, else two."""
    at = m * N + n
    if GATED:
        _store(upper / (1 + tl.exp(-upper)) * lower, added_ptr, y_ptr, at, mask & (n < N), ADD)
    else:
        _store(upper, added_ptr, y_ptr, at, mask & (n < N), ADD)
        _store(lower, added_ptr, y_ptr, at + 8, mask & (n + 8 < N), ADD)


@triton.jit(do_not_specialize=["N", "tiles", "steps"])
def _arranged_matmul_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr,
    N, K, tiles, blocks, steps, eps,
    M: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    ABREAST: tl.constexpr, HEIGHT: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    SQUARES: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS)
    warp, c = thread // 32, thread % 4
    zero, nothing = tl.zeros(thread.shape, tl.float32), tl.zeros_like(thread)
    PREFIXES: tl.constexpr = ABREAST > 1 and M <= 2
    X_ROWS: tl.constexpr = 1 if PREFIXES else 2  # rows of x whose products a thread has
    UNIT: tl.constexpr = 128.0 if PREFIXES else 1.0  # y is this times the products
    first_tile = tl.program_id(0).to(tl.int64) * HEIGHT
    starts, sums = (), ()
    for i in tl.static_range(HEIGHT):
        tile = tl.minimum(first_tile + i, tiles - 1)
        starts = starts + (pieces_ptr + PIECE_BYTES // 8 * blocks * tile,)  # noqa: RUF005
        sums = sums + ((zero,) * (2 * X_ROWS),)  # noqa: RUF005
    STEP: tl.constexpr = ABREAST * WARPS
    block = ABREAST * warp  # the first block of this warp's step
    x = ((nothing, nothing, nothing, nothing),) * (5 if ABREAST > 1 else 1)

    # shared memory of a warp: a ring of slots, each for a step
    PIECES: tl.constexpr = PIECE_BYTES * ABREAST * HEIGHT
    SLOT: tl.constexpr = PIECES + _x_stride(ABREAST) * ABREAST * M
    slot, turn = nothing, nothing
    if PTX:
        slot = allocate(STAGES * SLOT * WARPS) + STAGES * SLOT * warp
        for stage in tl.static_range(STAGES):
            copy_pieces(starts, slot + SLOT * stage, block + STEP * stage, blocks, ABREAST)
    wait_for_last(OVERLAP)
    if PTX:
        for stage in tl.static_range(STAGES):
            target = slot + (SLOT * stage + PIECES)
            _copy_x(x_ptr, target, block + STEP * stage, K, ABREAST, M)
            commit(thread)
    squares = ()
    if NORM:  # every thread squares its share of x
        for i in tl.static_range(M):
            of_row, x_row = zero, x_ptr + i * (K // 4)
            if SQUARES <= MOST_AT_ONCE:
                for start in tl.static_range(0, SQUARES):
                    of_row += _squares_of(x_row, thread + 32 * WARPS * start, K)
            else:
                for start in range(0, SQUARES):
                    of_row += _squares_of(x_row, thread + 32 * WARPS * start, K)
            squares = squares + (of_row,)  # noqa: RUF005

    for step in range(1 if STAGES == 1 else steps):
        if PTX:
            wait_for_copies(STAGES - 1, thread)
        sums, x = _add_pieces(
            sums, x, starts, slot + turn, x_ptr, block, blocks, K, M, ABREAST, PREFIXES, PTX
        )
        if PTX and STAGES > 1:
            wait_for_warp(thread)
            if step + STAGES < steps:
                ahead = block + STEP * STAGES
                copy_pieces(starts, slot + turn, ahead, blocks, ABREAST)
                _copy_x(x_ptr, slot + turn + PIECES, ahead, K, ABREAST, M)
            commit(thread)
            turn = tl.where(turn == SLOT * (STAGES - 1), 0, turn + SLOT)
        block += STEP

    # for a single row of x, the sum of its squares is reduced together with the products
    of_x = squares[0] if NORM else zero
    shares = ()
    for i in tl.static_range(HEIGHT):
        four = sums[i] if X_ROWS == 2 else sums[i] + sums[i]
        shares = shares + ((sums[i][0], sums[i][X_ROWS], of_x, of_x) if M == 1 else four,)  # noqa: RUF005
    totals = _over_warps(shares, slot, STAGES * SLOT, PTX)
    norms = ()
    for row in tl.static_range(M if NORM else 0):
        total = over_parts(totals[2], 32, 32) if M == 1 else tl.sum(squares[row])
        norms = norms + (UNIT * tl.rsqrt(total / K + eps),)  # noqa: RUF005
    Y_ROWS: tl.constexpr = 1 if M == 1 else X_ROWS
    n = (first_tile + warp) * (8 if GATED else 16) + thread // 4 % 8
    for i in tl.static_range(Y_ROWS):
        m = X_ROWS * c + i  # rows from M on repeat others, and are not stored
        scale = tl.full(m.shape, UNIT, tl.float32)
        for row in tl.static_range(M if NORM else 0):
            scale = tl.where(m == row, norms[row], scale)
        upper = over_parts(totals[i], 4, ABREAST) * scale
        lower = over_parts(totals[Y_ROWS + i], 4, ABREAST) * scale
        mask = (m < M) & (warp < HEIGHT)
        store_both(upper, lower, added_ptr, y_ptr, m, n, N, mask, GATED, ADD)


class Tiling(NamedTuple):
    """How the work is shared out."""

    abreast: int
    """Blocks of a step: 1, or 2 for up to four rows of x, or 4 for a single one."""
    height: int
    """Tiles of a program; each element of x is loaded once for all of them."""
    warps: int
    """Of a program; each multiplies a share of the columns."""
    registers: int = 128
    """Of a thread, at most; with fewer, the next kernel finds room to begin in."""


def _tiling(rows: int, tiles: int, in_features: int, processors: int) -> Tiling:
    """Choose the fastest on an H200; for small matrices, the fastest when kernels overlap."""
    blocks = triton.cdiv(in_features, BLOCK)
    if rows == 1 and tiles <= processors:  # as many warps as have a block, and squares to add up
        return Tiling(1, 1, 4 if in_features <= 512 else 8 if in_features <= 1024 else 16)
    many, warps = tiles > 4 * processors, 2 if blocks > 48 else 4
    if rows == 1:
        return Tiling(4, 1, warps)
    if rows == 2:
        return Tiling(2, 2, 4) if many else Tiling(2, 1, 2 if blocks > 48 else 8)
    if rows <= 4:
        return Tiling(2, 2 if many else 1, warps)
    return Tiling(1, 4 if tiles > 6 * processors else 2, 4)


def _arranged_matmul_triton(x, pieces, out_features, in_features, gated, eps, added, dtype):
    y = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    tiles, blocks = pieces.shape[:2]
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    to = y if added is None else added.contiguous()
    abreast, height, warps, registers = _tiling(len(x), tiles, in_features, num_processors(x))
    steps = triton.cdiv(blocks, abreast * warps)
    of_x = 2 * BLOCK + (16 if abreast > 1 else 0)
    slot = abreast * (height * (TRIT_BYTES + SCALE_BYTES) + len(x) * of_x)
    stages = min(steps, max(2, SHARED_BYTES // (warps * slot)))
    _arranged_matmul_kernel[(triton.cdiv(tiles, height),)](
        x.flatten().view(torch.int64), pieces.view(torch.int64), to, y,
        out_features, in_features, tiles, blocks, steps, 0.0 if eps is None else eps,
        M=len(x), NORM=eps is not None, GATED=gated, ADD=added is not None,
        ABREAST=abreast, HEIGHT=height, WARPS=warps, STAGES=stages,
        SQUARES=triton.cdiv(in_features, 128 * warps), PTX=HAS_PTX,
        num_warps=warps, maxnreg=registers, **overlap_options(x),
    )  # fmt: skip
    return y


def arranged_matmul(
    x: Tensor,
    weight: Arranged,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise few rows, multiply them by an arranged matrix, gate the result and add to it.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 8 rows, K a multiple of 8.
        weight: the matrix, and whether the result is gated.
        eps: added to the mean square; None leaves the norm out.
        added: like the result; None leaves the sum out.
        dtype: of the result, bfloat16 or float32; by default that of `x`.

    Returns:
        (M, N) in `dtype`, accumulated in float32 and rounded once.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    dtype = dtype or x.dtype
    check_few_rows(x, weight.in_features, added, (dtype, weight.out_features), multiple=8)
    run = _arranged_matmul_triton if uses_triton(x) else _arranged_matmul_torch
    return run(x, *weight, eps, added, dtype)


def check_few_rows(
    x: Tensor,
    in_features: int,
    added: Tensor | None,
    like: tuple[torch.dtype, int],
    multiple: int = 1,
    most: int = MOST_ROWS,
) -> None:
    """Refuse what cannot be multiplied as few rows, or added to the result.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to `most` rows.
        in_features: K.
        added: (M, N), or None.
        like: dtype and N of the result.
        multiple: what K has to be one of.
        most: the largest M.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    got = f"{x.dtype} of shape {tuple(x.shape)}"
    fits = x.dim() == 2 and x.shape[1] == in_features and x.is_contiguous()
    if x.dtype != torch.bfloat16 or not fits:
        raise ValueError(f"need contiguous bfloat16 rows of {in_features}, got {got}")
    if not 1 <= len(x) <= most or in_features % multiple:
        of = f" of a multiple of {multiple} elements" if multiple > 1 else ""
        raise ValueError(f"need 1 to {most} rows{of}, got {got}")
    dtype, shape = like[0], (len(x), like[1])
    if added is not None and (added.dtype, added.shape) != (dtype, shape):
        got = f"{added.dtype} {tuple(added.shape)}"
        raise ValueError(f"need {dtype} {shape} to add to, got {got}")


SHAPES = (
    (8, 68, 168, 96, False, None, False), (1, 1, 8, 32, False, 0.1, False),
    (1, 34, 1000, 32, True, 1e-6, True), (1, 17, 328, 96, False, 1e-6, True),
    (1, 20, 3288, 32, False, 1e-6, False), (1, 48, 2720, 32, True, None, False),
    (2, 20, 2728, 32, True, 1e-6, True), (5, 35, 1512, 32, False, 1e-6, True),
    (1, 90, 328, 32, False, None, True),
)  # fmt: skip
"""(M, rows, K, G, gated, eps, whether something is added)."""


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for m, rows, in_features, group_size, gated, eps, adds in SHAPES:
        packed = random_packed(rows, in_features, group_size, generator, spread=8)
        weight = arrange(packed, gated)
        x = torch.randn(m, in_features, generator=generator)
        x *= 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)
        added = torch.randn(m, weight.out_features, generator=generator)
        for dtype in dtypes:  # bf16 results have a coarser gate
            low = dtype == torch.bfloat16
            label = f"{m}x{rows}x{in_features}{' gate' * gated}{' norm' * (eps is not None)}"
            yield Case(
                f"{label}{' sum' * adds} {str(dtype).removeprefix('torch.')}",
                (x.to(device, torch.bfloat16), weight.pieces.to(device), *weight[1:], eps,
                 added.to(device, dtype) if adds else None, dtype),
                peer=_arranged_matmul_torch if low else None,
            )  # fmt: skip


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    half = {"device": device, "dtype": torch.bfloat16}
    shapes = ((1, 11264, 2048, True), (1, 2048, 5632, False), (1, *MATRIX, False))
    for m, rows, in_features, gated in (*shapes, (8, *MATRIX, False)):
        packed = random_packed(rows, in_features, 32, generator, spread=8)
        weight = arrange(packed, gated)
        x, added = torch.randn(m, in_features, **half), torch.randn(m, weight.out_features, **half)
        yield Timing(
            f"{m}x{rows}x{in_features}{' gate' * gated}",
            (x, *weight, 1e-6, added, x.dtype),
            peer=partial(with_torch, x, decode_weight(packed), gated, added),
            peer_name="torch and cuBLAS bf16",
            flops=2 * m * rows * in_features,
        )


def with_torch(x: Tensor, weight: Tensor, gated: bool, added: Tensor) -> Tensor:
    """Do the same with dense weights, one operation at a time."""
    y = functional.linear(functional.rms_norm(x, x.shape[1:], eps=1e-6), weight)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    return added + y


ARRANGED_MATMUL = KernelSpec(
    "arranged_matmul", _arranged_matmul_triton, _arranged_matmul_torch, arranged_matmul_reference,
    _cases,
    Gate(
        exact=False,
        relative=1e-3,
        peer_slack=0.1,
        reason="float32 sums of up to 3288 products, which for one or two rows begin some 200 times"
        " as large as they end; in bf16 one rounding, as torch's float32 has",
    ),
    timings=_timings,
)  # fmt: skip

"""Products of up to 64 rows, none of which depends on the others: y = added + gate(norm(x) @ w.T).

Norm, gate, sum and the arrangement of w are those of `arranged_matmul`. What is promised besides: a
row of the result has the same bits whatever the other rows are, and however many. So a text is the
same whether it is made alone or with others. For that, the order of every sum follows from the
shape of w alone: a warp takes every `warps`-th block of columns, and warps are summed in order.

Work. Thread 4 r + c of a warp decodes bytes 8 c .. 8 c + 7 of rows r and r + 8 of a piece, as in
`few_rows`, and multiplies their trits by the scales before any product, so that all blocks add to
the same sums. The matrix instruction has columns for eight rows of x; for more it is repeated with
the same trits. The squares of the norm are products too: of x with itself, of which the diagonal
is kept.

Pieces are copied to shared memory some steps ahead, the first of them before the kernel waits for
the one that makes x.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.codec.warp_products import (
    HAS_PTX,
    add_products,
    multiply_pairs,
    spread,
    take_digits,
)
from arbcli.kernels.matmul.arranged_matmul import (
    PIECE_BYTES,
    SCALES_AT,
    SHARED_BYTES,
    Arranged,
    arrange,
    arranged_matmul_reference,
    as_words,
    check_few_rows,
    copy_pieces,
    decode_arranged,
    over_parts,
    read_scales,
    read_unit,
    with_torch,
)
from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.backend import capability, num_processors, uses_triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.shared_memory import (
    allocate,
    commit,
    read_four,
    read_four_of,
    wait_for_cluster,
    wait_for_copies,
    wait_for_warp,
    write_four_where,
)
from arbcli.kernels.runtime.spec import MATRIX, Case, Gate, KernelSpec, Timing

MOST_TEXTS = 64
"""Largest M."""
UNROLLED = 6
"""Pieces of a warp in straight code: between them, no registers are moved."""
UNIT_BYTES = tl.constexpr(512)
"""What a warp has of 16 rows of w times 8 rows of x: four float32 a thread."""
_LOAD_X = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $5, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
_LOAD_ONE = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $2, 0;
mov.KIND $0, 0;
@p ld.global.KIND $0, [$1];
}""")
_STORE_ONE = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $2, 0;
mov.b32 $0, 0;
@p st.global.KIND [$1], $3;
}""")
_TWICE_LOW = tl.constexpr("prmt.b32 $0, $1, 0, 0x1010;")
_TWICE_HIGH = tl.constexpr("prmt.b32 $0, $1, 0, 0x3232;")
_FROM_LANE = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")


@triton.jit
def _load_x(pointer, mask, PTX: tl.constexpr):
    """Load eight elements of x as four int32 where `mask`; elsewhere zeros.

    Not before what stands before it: an earlier kernel may still be writing x.
    """
    if PTX:
        x = tl.inline_asm_elementwise(
            _LOAD_X, "=&r,=&r,=&r,=&r,l,r", [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        x, words = (), pointer.to(tl.pointer_type(tl.int32))
        for i in tl.static_range(4):
            x = x + (tl.load(words + i, mask=mask, other=0),)  # noqa: RUF005
    return x


@triton.constexpr_function
def _of_kind(ptx, bits):
    return ptx.replace("KIND", f"b{bits}")


@triton.jit
def _load_one(pointer, mask, PTX: tl.constexpr):
    """Load a float32 or bfloat16 as float32 where `mask`; elsewhere 0.

    Triton plans the work of a cluster by its own loads and stores, which fails for such a kernel.
    """
    if PTX:
        TYPE: tl.constexpr = pointer.dtype.element_ty
        BITS: tl.constexpr = TYPE.primitive_bitwidth
        CODE: tl.constexpr = _of_kind(_LOAD_ONE, BITS)
        REGISTERS: tl.constexpr = "=&r,l,r" if BITS == 32 else "=&h,l,r"
        value = tl.inline_asm_elementwise(
            CODE, REGISTERS, [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32 if BITS == 32 else tl.int16, is_pure=False, pack=1,
        ).to(TYPE, bitcast=True)  # fmt: skip
    else:
        value = tl.load(pointer, mask=mask, other=0)
    return value.to(tl.float32)


@triton.jit
def _store_one(pointer, value, mask, PTX: tl.constexpr):
    """Round a float32 to what is stored, where `mask`."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    if PTX:
        BITS: tl.constexpr = TYPE.primitive_bitwidth
        CODE: tl.constexpr = _of_kind(_STORE_ONE, BITS)
        REGISTERS: tl.constexpr = "=&r,l,r,r" if BITS == 32 else "=&r,l,r,h"
        bits = value.to(TYPE).to(tl.int32 if BITS == 32 else tl.int16, bitcast=True)
        tl.inline_asm_elementwise(
            CODE, REGISTERS, [pointer.to(tl.int64), mask.to(tl.int32), bits],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointer, value.to(TYPE), mask=mask)


@triton.jit
def _from_lane_of_warp(value, lane, PTX: tl.constexpr):
    """Fetch a float32 from a thread of the same warp."""
    if PTX:
        return tl.inline_asm_elementwise(
            _FROM_LANE, "=f,f,r", [value, lane], dtype=tl.float32, is_pure=False, pack=1
        )
    thread = tl.arange(0, value.shape[0])
    return tl.gather(value, thread // 32 * 32 + lane, 0)


@triton.jit
def _scale_rows(pairs, word, PTX: tl.constexpr):
    """Multiply the trits of rows r and r + 8, four pairs each, by the scales in a word."""
    if PTX:
        upper = tl.inline_asm_elementwise(
            _TWICE_LOW, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
        lower = tl.inline_asm_elementwise(
            _TWICE_HIGH, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        upper = (word & 0xFFFF) | (word << 16)
        lower = ((word >> 16) & 0xFFFF) | (word & -0x10000)
    scaled = ()
    for i in tl.static_range(8):
        scaled = scaled + (multiply_pairs(pairs[i], upper if i < 4 else lower, PTX),)  # noqa: RUF005
    return scaled


@triton.jit
def _load_digit(x_starts, block, digit: tl.constexpr, K, PTX: tl.constexpr):
    """Load what a digit of a block is multiplied by, of each eight rows of x."""
    k, x = 160 * block + 32 * digit + 8 * (tl.arange(0, block.shape[0]) % 4), ()
    for t in tl.static_range(len(x_starts)):
        x = x + (_load_x(x_starts[t] + k // 4, k < K, PTX),)  # noqa: RUF005
    return x


@triton.jit
def _read_piece(piece, at, PTX: tl.constexpr):
    """Read a thread's part of a piece: what `take_digits` takes, and its scales."""
    thread = tl.arange(0, at.shape[0])
    r, c, qs = thread // 4 % 8, thread % 4, ()
    words = read_unit(piece + 16 * c + 2 * r, at + (128 * c + 16 * r), PTX)
    for k in tl.static_range(4):
        qs = qs + spread(words[k], PTX)
    first, last = at + (SCALES_AT + 16 * r), at + (SCALES_AT + 128 + 4 * r)
    return qs, read_scales(piece, r, first, last, PTX)


@triton.jit
def _add_pieces(
    sums, squares, qs, scales, x, x_starts, block, K, AHEAD: tl.constexpr, PTX: tl.constexpr
):
    """Add the products of pieces of a block, and those of x with itself if there are `squares`.

    Args:
        sums: of each piece, and of each eight rows of x.
        squares: of each eight rows of x, or none.
        qs: the trits of all pieces: see `_read_piece`.
        scales: of each piece: likewise.
        x: of digits 4 to 0; if `AHEAD` is 0, it is loaded instead.
        x_starts: of the rows of x, or none.
        block: which one the pieces are of.
        K: the columns.
        AHEAD: to load x of the block this far behind, in place of each digit's when it was used.
        PTX: whether PTX is understood.
    """
    HEIGHT: tl.constexpr = len(scales)
    OCTETS: tl.constexpr = len(sums) // HEIGHT
    later = ()
    for digit in tl.static_range(4, -1, -1):
        if AHEAD == 0:
            of_x = _load_digit(x_starts, block, digit, K, PTX)
        else:
            of_x = x[OCTETS * (4 - digit) : OCTETS * (5 - digit)]
        pairs, qs = take_digits(qs, digit, PTX)
        added, more = (), ()
        for i in tl.static_range(HEIGHT):
            scaled = _scale_rows(pairs[8 * i : 8 * i + 8], scales[i][digit], PTX)
            for t in tl.static_range(OCTETS):
                products = add_products(sums[OCTETS * i + t], scaled, of_x[t], PTX)
                added = added + (products,)  # noqa: RUF005
        for t in tl.static_range(len(squares)):
            both = of_x[t // 2 * 2] + of_x[min(t // 2 * 2 + 1, OCTETS - 1)]
            more = more + (add_products(squares[t], both, of_x[t], PTX),)  # noqa: RUF005
        sums, squares = added, more
        if AHEAD > 0 and len(x_starts) > 0:
            later = later + _load_digit(x_starts, block + AHEAD, digit, K, PTX)
    return sums, squares, later


@triton.jit
def _sum_shares(units, memory, share, group, SHARES: tl.constexpr, CTAS: tl.constexpr):
    """Sum units over the shares of a block of threads, and leave them where `memory` begins.

    The first share's warps add what the others write, in order.
    """
    thread = tl.arange(0, share.shape[0])
    UNITS: tl.constexpr = len(units)
    PARTS: tl.constexpr = SHARES // CTAS
    GROUPS: tl.constexpr = share.shape[0] // (32 * SHARES)
    APART: tl.constexpr = UNIT_BYTES * UNITS * GROUPS
    part = share % PARTS
    at = memory + (UNIT_BYTES * UNITS * group + 16 * (thread % 32))
    tl.debug_barrier()  # all warps are done with what was in this memory
    if PARTS > 1:
        for u in tl.static_range(UNITS):
            there = at + (APART * (part - 1) + UNIT_BYTES * u)
            write_four_where(there, as_words(units[u]), part > 0)
        tl.debug_barrier()
    for u in tl.static_range(UNITS):
        four = units[u]
        for p in tl.static_range(PARTS - 1):
            words, total = read_four(at + (APART * p + UNIT_BYTES * u)), ()
            for j in tl.static_range(4):
                total = total + (four[j] + words[j].to(tl.float32, bitcast=True),)  # noqa: RUF005
            four = total
        write_four_where(at + UNIT_BYTES * u, as_words(four), part == 0)
    if CTAS > 1:
        wait_for_cluster(thread)
    else:
        tl.debug_barrier()


@triton.jit
def _find_unit(
    units, memory, unit, group, SHARES: tl.constexpr, CTAS: tl.constexpr, PTX: tl.constexpr
):
    """Find a group's sum of a unit, which may be another one in each warp.

    Args:
        units: what the threads have of them, for where there is no PTX.
        memory: where `_sum_shares` left the sums of a block of threads.
        unit: which one.
        group: of the warp.
        SHARES: of the columns, of which there are warps.
        CTAS: blocks of threads of a cluster, whose sums are to be added.
        PTX: whether PTX is understood.
    """
    thread = tl.arange(0, unit.shape[0])
    found = (tl.zeros(thread.shape, tl.float32),) * 4
    if PTX:
        at = memory + (UNIT_BYTES * (len(units) * group + unit) + 16 * (thread % 32))
        for rank in tl.static_range(CTAS):
            words, total = read_four_of(at, rank) if CTAS > 1 else read_four(at), ()
            for j in tl.static_range(4):
                total = total + (found[j] + words[j].to(tl.float32, bitcast=True),)  # noqa: RUF005
            found = total
    else:
        for u in tl.static_range(len(units)):
            total = ()
            for j in tl.static_range(4):
                of_all = over_parts(units[u][j], thread.shape[0], SHARES)
                total = total + (tl.where(unit == u, of_all, found[j]),)  # noqa: RUF005
            found = total
    return found


@triton.jit(do_not_specialize=["M", "N", "tiles"])
def _arranged_rows_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr,
    M, N, K, tiles, blocks, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    HEIGHT: tl.constexpr, OCTETS: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr,
    CTAS: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    BYTES: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS * CTAS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    SHARES: tl.constexpr = WARPS * CTAS // GROUPS
    share, group = warp // GROUPS, warp % GROUPS
    zero, nothing = tl.zeros(thread.shape, tl.float32), tl.zeros_like(thread)
    first_tile = (tl.program_id(0) * GROUPS + group) * HEIGHT
    first_row = tl.program_id(1) * (8 * OCTETS)
    start = pieces_ptr + first_tile.to(tl.int64) * (PIECE_BYTES // 8 * blocks)
    x_starts = ()
    for t in tl.static_range(OCTETS):  # rows from M on repeat the last, and are not stored
        row = tl.minimum(first_row + 8 * t + r, M - 1)
        x_starts = x_starts + (x_ptr + row * (K // 4),)  # noqa: RUF005
    sums = ((zero,) * 4,) * (HEIGHT * OCTETS)
    squares = ((zero,) * 4,) * (OCTETS if NORM else 0)

    # shared memory of a warp: a ring of slots for the pieces of a step; later, sums
    SLOT: tl.constexpr = PIECE_BYTES * HEIGHT
    memory, slot = nothing, nothing
    if PTX:
        memory = allocate(BYTES) + nothing
        slot = memory + SLOT * STAGES * (warp % WARPS)
        for stage in tl.static_range(STAGES):
            for i in tl.static_range(HEIGHT):
                block = tl.where(first_tile + i < tiles, SHARES * stage + share, blocks)
                tile = start + PIECE_BYTES // 8 * blocks * i
                copy_pieces((tile,), slot + (SLOT * stage + PIECE_BYTES * i), block, blocks, 1)
                commit(thread)
    wait_for_last(OVERLAP)
    # up to 16 rows of x are kept in registers, those of the next block loaded as they are used
    KEPT: tl.constexpr = OCTETS <= 2
    x = ()
    for digit in tl.static_range(4, -1 if KEPT else 4, -1):
        x = x + _load_digit(x_starts, share, digit, K, PTX)
    # what sums are added to arrives while they are made
    UNITS: tl.constexpr = HEIGHT * OCTETS
    PARTS: tl.constexpr = SHARES // CTAS
    who = share % PARTS * CTAS + share // PARTS
    N_ROWS: tl.constexpr = 8 if GATED else 16
    extra = ()
    for turn in tl.static_range(0, UNITS if ADD else 0, SHARES):
        unit = tl.minimum(turn + who, UNITS - 1)
        n = (first_tile + unit // OCTETS) * N_ROWS + r
        for j in tl.static_range(2):
            m = tl.minimum(first_row + unit % OCTETS * 8 + 2 * c + j, M - 1)
            for half in tl.static_range(1 if GATED else 2):
                at = n + 8 * half
                value = _load_one(added_ptr + (m * N + at), at < N, PTX)
                extra = extra + (value,)  # noqa: RUF005
    turned = nothing
    for step in tl.range(STEPS, loop_unroll_factor=UNROLL):
        block = SHARES * step + share
        all_qs, all_scales, later = (), (), ()
        for i in tl.static_range(HEIGHT):
            tile, slot_of = start + PIECE_BYTES // 8 * blocks * i, slot + turned + PIECE_BYTES * i
            piece = tile
            if PTX:
                wait_for_copies(HEIGHT * STAGES - 1, thread)
            else:
                last_tile = tl.minimum(first_tile + i, tiles - 1).to(tl.int64)
                last_block = tl.minimum(block, blocks - 1)
                piece = pieces_ptr + PIECE_BYTES // 8 * (last_tile * blocks + last_block)
            qs, scales = _read_piece(piece, slot_of, PTX)
            if PTX:
                wait_for_warp(thread)
                if step + STAGES < STEPS:
                    some = (first_tile + i < tiles) & (block + SHARES * STAGES < blocks)
                    ahead = tl.where(some, block + SHARES * STAGES, blocks)
                    copy_pieces((tile,), slot_of, ahead, blocks, 1)
                commit(thread)
            if KEPT:
                of_tile, of_x, later = _add_pieces(
                    sums[OCTETS * i : OCTETS * i + OCTETS], squares if i == HEIGHT - 1 else (),
                    qs, (scales,), x, x_starts if i == HEIGHT - 1 else (), block, K, SHARES, PTX,
                )  # fmt: skip
                sums = sums[: OCTETS * i] + of_tile + sums[OCTETS * i + OCTETS :]
                if i == HEIGHT - 1:
                    squares, x = of_x, later
            else:
                all_qs, all_scales = all_qs + qs, all_scales + (scales,)  # noqa: RUF005
        if not KEPT:
            sums, squares, later = _add_pieces(
                sums, squares, all_qs, all_scales, x, x_starts, block, K, 0, PTX
            )
        turned = tl.where(turned == SLOT * (STAGES - 1), 0, turned + SLOT)
    units = sums + squares
    if PTX:
        wait_for_copies(0, thread)
        _sum_shares(units, memory, share, group, SHARES, CTAS)

    # the warps of a group store its units in turns
    for turn in tl.static_range(0, UNITS, SHARES):
        unit = turn + who
        some, unit = unit < UNITS, tl.minimum(unit, UNITS - 1)
        i, t = unit // OCTETS, unit % OCTETS
        y = _find_unit(units, memory, unit, group, SHARES, CTAS, PTX)
        if NORM:
            of_x = _find_unit(units, memory, UNITS + t, group, SHARES, CTAS, PTX)
        n = (first_tile + i) * N_ROWS + r
        for j in tl.static_range(2):
            m = first_row + 8 * t + 2 * c + j
            upper, lower = y[j], y[2 + j]
            if NORM:  # row 2 c + j of x times itself is in thread 4 (2 c + j) + c
                square = tl.where(t % 2 == 0, of_x[j], of_x[2 + j])
                square = _from_lane_of_warp(square, 9 * c + 4 * j, PTX)
                factor = tl.rsqrt(square / K + eps)
                upper, lower = upper * factor, lower * factor
            mask = some & (m < M)
            if GATED:
                upper = upper / (1 + tl.exp(-upper)) * lower
            both = (upper, lower)
            for half in tl.static_range(1 if GATED else 2):
                found, at = both[half], n + 8 * half
                if ADD:
                    found += extra[(turn // SHARES * 2 + j) * (1 if GATED else 2) + half]
                _store_one(y_ptr + (m * N + at), found, mask & (at < N), PTX)
    if PTX and CTAS > 1:
        wait_for_cluster(thread)  # others may still read what this block has
        if tiles < 0:  # never: Triton plans clusters by stores, and needs one that is not PTX
            tl.store(y_ptr, 0.0)


class Tiling(NamedTuple):
    """How the work is shared out; all but the height and the octets decide the order of sums."""

    ctas: int
    """Blocks of threads of a cluster, which share out the columns, and then add up."""
    groups: int
    """Of warps of a block, each with tiles of its own; the others share out the columns."""
    height: int
    """Tiles of a group; what is loaded of x is multiplied by all of them."""
    octets: int
    """Eights of rows of x that a program has; trits are decoded once for all of them."""
    warps: int = 8
    """Of a block."""


def _tiling(rows: int, tiles: int, blocks: int, processors: int, clusters: bool) -> Tiling:
    """Choose what a program takes; its order of sums by the matrix alone."""
    ctas, groups = (4, 4) if clusters else (1, 1)
    octets = 1 if rows <= 8 else 2 if rows <= 16 else 4
    most = 3 if octets < 4 else 2
    height = max(1, min(most, -(-tiles * ctas // (groups * processors))))
    return Tiling(ctas, groups, height, octets)


def _arranged_rows_triton(x, pieces, out_features, in_features, gated, eps, added, dtype):
    y = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    tiles, blocks = pieces.shape[:2]
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    to = y if added is None else added.contiguous()
    clusters = not INTERPRETED and capability(x) >= (9, 0)
    ctas, groups, height, octets, warps = _tiling(
        len(x), tiles, blocks, num_processors(x), clusters
    )
    shares = warps * ctas // groups
    steps, slot = triton.cdiv(blocks, shares), warps * height * PIECE_BYTES.value
    units = (height + (eps is not None)) * octets * UNIT_BYTES.value
    stages = max(1, min(steps, SHARED_BYTES // slot))
    _arranged_rows_kernel[
        (triton.cdiv(tiles, groups * height), triton.cdiv(len(x), 8 * octets))
    ](
        x.flatten().view(torch.int64), pieces.view(torch.int64), to, y,
        len(x), out_features, in_features, tiles, blocks, 0.0 if eps is None else eps,
        NORM=eps is not None, GATED=gated, ADD=added is not None,
        HEIGHT=height, OCTETS=octets, GROUPS=groups, WARPS=warps, CTAS=ctas, STAGES=stages,
        STEPS=steps, UNROLL=max(1, min(steps, UNROLLED // height)),
        BYTES=max(stages * slot, max(1, shares // ctas - 1) * groups * units), PTX=HAS_PTX,
        num_warps=warps, num_ctas=ctas, maxnreg=128, **overlap_options(x),
    )  # fmt: skip
    return y


def _arranged_rows_torch(x, pieces, out_features, in_features, gated, eps, added, dtype):
    weight = decode_arranged(pieces)[:, :in_features]
    results = []
    for row in x.float():  # one by one, because the sums of a product depend on its rows
        row = row[None] if eps is None else functional.rms_norm(row[None], row.shape, eps=eps)
        y = (row @ weight.T).view(1, -1, 2, 8)
        results.append(functional.silu(y[:, :, 0]) * y[:, :, 1] if gated else y)
    y = torch.cat(results).flatten(1)[:, :out_features]
    return (y if added is None else added + y).to(dtype)


def arranged_rows(
    x: Tensor,
    weight: Arranged,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise rows, multiply them by an arranged matrix, gate the result and add to it.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 64 rows, K a multiple of 8.
        weight: the matrix, and whether the result is gated.
        eps: added to the mean square; None leaves the norm out.
        added: like the result; None leaves the sum out.
        dtype: of the result, bfloat16 or float32; by default that of `x`.

    Returns:
        (M, N) in `dtype`, accumulated in float32 and rounded once. A row's bits do not depend on
        other rows, nor on M.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    dtype = dtype or x.dtype
    like = dtype, weight.out_features
    check_few_rows(x, weight.in_features, added, like, multiple=8, most=MOST_TEXTS)
    run = _arranged_rows_triton if uses_triton(x) else _arranged_rows_torch
    return run(x, *weight, eps, added, dtype)


SHAPES = (
    (1, 1, 8, 32, False, 0.1, False), (9, 34, 328, 32, True, 1e-6, True),
    (5, 20, 168, 96, False, 1e-6, False), (3, 20, 1512, 32, False, None, True),
    (2, 180, 8, 32, False, None, False), (33, 18, 40, 32, False, 1e-6, True),
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
                peer=_arranged_rows_torch if low else None,
            )  # fmt: skip


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    half = {"device": device, "dtype": torch.bfloat16}
    (rows, in_features), gated = MATRIX, True
    packed = random_packed(rows, in_features, 32, generator, spread=8)
    weight = arrange(packed, gated)
    for m in (4, 16, 64):
        x, added = torch.randn(m, in_features, **half), torch.randn(m, weight.out_features, **half)
        yield Timing(
            f"{m}x{rows}x{in_features} gate",
            (x, *weight, 1e-6, added, x.dtype),
            peer=partial(with_torch, x, decode_weight(packed), gated, added),
            peer_name="torch and cuBLAS bf16",
            flops=2 * m * rows * in_features,
        )


ARRANGED_ROWS = KernelSpec(
    "arranged_rows", _arranged_rows_triton, _arranged_rows_torch, arranged_matmul_reference,
    _cases,
    Gate(
        exact=False,
        relative=1e-3,
        peer_slack=0.1,
        reason="float32 sums of up to 1512 products, added up by the matrix units; in bf16 one"
        " rounding, as torch's float32 has",
    ),
    timings=_timings,
)  # fmt: skip

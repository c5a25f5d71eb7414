"""Attention of several new bytes of a text that may be rejected: the ring is not changed.

Each new byte attends to the ring, to the new bytes before it, and to itself. The result has the
bits of decoding one byte at a time: the key and value of an earlier new byte replace those of the
slot in which it would have been stored. Later bytes, which would overwrite the oldest slots of a
full ring, replace nothing. Rotated and normalised keys, and values, are returned; once it is known
how many bytes are accepted, `keep_accepted_` stores theirs.

    shared memory    queries of all new bytes, their keys, their values: a vector of d bf16 each
    registers        keys and values of a span, eight elements of a slot a thread (`attend_parts`)
    byte i           has byte i - 1 put in its slot of these registers, then all slots multiplied

Reason: the ring is read once for all new bytes and must not change. A slot is replaced in the
registers of the threads that hold it, and no other thread waits for that.

Work. A program computes one part of a head, as in `attend_parts`, for some of the new bytes, and
reads the keys and values of a span once for all of them. Its warps first rotate the new vectors and
write them to shared memory. Then it processes the bytes in order: before each byte, it puts the
key and value of the previous byte in their slot, in registers. A second kernel combines the parts
of each byte, all of which it loads at once. For a single byte the next product combines the parts;
here each of its programs would have to read all parts of all bytes.
"""

from collections.abc import Callable
from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from arbcli.families.ahead.config import MAX_AHEAD
from arbcli.kernels.attention.attend_parts import (
    ALIGNED,
    MAX_PARTS,
    REGISTERS,
    WARPS,
    WIDTHS,
    add_span,
    attend_parts,
    begin_sums,
    load_span,
    rotate,
    rotated_angles,
    sharing,
    store_part,
    write_sums,
)
from arbcli.kernels.attention.decode_attention import SpeculativeRings, decode_attention
from arbcli.kernels.runtime import ptx
from arbcli.kernels.runtime.arguments import compiled_check, declared
from arbcli.kernels.runtime.backend import backend_of, num_processors
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last


def slots_of(position: Tensor, rows: int, window: int) -> Tensor:
    """Compute the ring slots of M positions from an int32 scalar tensor on: (M,) int64."""
    return ((position + torch.arange(rows, device=position.device)) % window).long()


def _attend_in_turn(
    attend: Callable[[Tensor, Tensor], Tensor], qkv: Tensor, keys: Tensor, values: Tensor,
    new: Tensor, position: Tensor,
) -> list:  # fmt: skip
    """Attend from one position after another, then restore the rings.

    Args:
        attend: from (3, heads, d) and a position; it stores them in the rings.
        qkv: (M, 3, heads, d).
        keys: the ring, (heads, W, d).
        values: likewise.
        new: (2, M, heads, d), set to the keys and values that it stored.
        position: int32 scalar.

    Returns:
        The results of `attend`, concatenated.
    """
    slots = slots_of(position, len(qkv), keys.shape[1])
    before = keys[:, slots], values[:, slots]
    results = [attend(row, position + number) for number, row in enumerate(qkv.unbind())]
    for ring, old, stored in zip((keys, values), before, new, strict=True):
        stored.copy_(ring[:, slots].transpose(0, 1))
        ring.index_copy_(1, slots, old)
    return results


def _attend_ahead_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, new: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, eps: float, max_parts: int = MAX_PARTS,
) -> Tensor:  # fmt: skip
    def attend(row: Tensor, place: Tensor) -> Tensor:
        return attend_parts(row, keys, values, place, cos, sin, eps, max_parts).combine()

    return torch.stack(_attend_in_turn(attend, qkv, keys, values, new, position))


@triton.jit
def _vectors_of(thread, M: tl.constexpr, WIDTH: tl.constexpr):
    """Map threads to the vectors of new bytes; several threads share a vector.

    Vector v is of byte v mod M: first queries, then keys, then values.
    """
    LANES: tl.constexpr = WIDTH // 8
    vectors = ()
    for first in tl.static_range(0, 3 * M, thread.shape[0] // LANES):
        v = tl.minimum(first + thread // LANES, 3 * M - 1)  # the last one again
        vectors = vectors + (v,)  # noqa: RUF005
    return vectors


@triton.jit
def _take_new(
    qkv_ptr, new_ptr, angles, head, HEADS, eps, stores, memory, thread,
    M: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rotate the new queries and keys of a head, and write them and the values to shared memory.

    Args:
        qkv_ptr: words of two elements, (M, 3, heads, d).
        new_ptr: likewise, (2, M, heads, d), to which keys and values are stored if `stores`.
        angles: cosines and sines of each vector of `_vectors_of`.
        head: index of the head.
        HEADS: number of heads.
        eps: added to the mean square.
        stores: whether this program stores the new keys and values.
        memory: shared-memory address of the vectors.
        thread: index of each thread.
        M: number of new bytes.
        WIDTH: width of a head.
        PTX: whether the compiler accepts PTX.
    """
    HALF: tl.constexpr = WIDTH // 2
    d, vectors, words = 8 * (thread % (WIDTH // 8)), _vectors_of(thread, M, WIDTH), ()
    # load all vectors before the first use
    for i in tl.static_range(len(vectors)):
        place = (vectors[i] % M * 3 + vectors[i] // M) * HEADS + head
        words = words + (ptx.load_new(qkv_ptr + place * HALF + d // 2, PTX),)  # noqa: RUF005
    for i in tl.static_range(len(vectors)):
        # rotate queries and keys; values are copied
        v, plain, four = vectors[i], words[i], ()
        rotated = rotate(plain, angles[i][0], angles[i][1], eps, WIDTH, PTX)
        for j in tl.static_range(4):
            four = four + (tl.where(v < 2 * M, rotated[j], plain[j]),)  # noqa: RUF005
        ptx.write_four(memory + (2 * WIDTH * v + 2 * d), four, PTX)
        if stores:
            to = new_ptr + ((v - M) * HEADS + head) * HALF + d // 2
            for j in tl.static_range(4):
                tl.store(to + j, four[j], mask=v >= M)


@triton.jit
def _begin_row(
    memory, row, d, scale, adds_new, thread, M: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    """Load the query of a byte and initialise its sums, with the byte itself if `adds_new`."""
    LANES: tl.constexpr = WIDTH // 8
    at = memory + (2 * WIDTH * row + 2 * d)
    q, total = ptx.unpair_four(ptx.read_four(at, PTX)), tl.zeros(thread.shape, tl.float32)
    sums = (total,) * 8
    if PTX:
        adds_new &= ptx.warp_number() == 0
    if adds_new:
        k_words = ptx.read_four(at + 2 * WIDTH * M, PTX)
        v_words = ptx.read_four(at + 4 * WIDTH * M, PTX)
        sums, total = begin_sums(q, k_words, v_words, thread < LANES, scale, LANES, PTX)
    return q, sums, total


@triton.jit
def _put_row(
    keys, values, memory, row, slot, mine, start, d,
    M: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Replace the key and value in a byte's slot, if the span from slot `start` contains it."""
    if (slot >= start) & (slot < start + STRIDE * len(keys)):
        at = memory + (2 * WIDTH * (M + row) + 2 * d)
        k_words, v_words = ptx.read_four(at, PTX), ptx.read_four(at + 2 * WIDTH * M, PTX)
        new_keys, new_values = (), ()
        for i in tl.static_range(len(keys)):
            here, slot_keys, slot_values = mine + STRIDE * i == slot, (), ()
            for j in tl.static_range(4):
                slot_keys = slot_keys + (tl.where(here, k_words[j], keys[i][j]),)  # noqa: RUF005
                slot_values = slot_values + (tl.where(here, v_words[j], values[i][j]),)  # noqa: RUF005
            new_keys = new_keys + (slot_keys,)  # noqa: RUF005
            new_values = new_values + (slot_values,)  # noqa: RUF005
        keys, values = new_keys, new_values
    return keys, values


@triton.jit
def _put_before(
    keys, values, memory, before, begin_row, W, mine, start, d,
    M: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Replace keys and values in the slots of the bytes before a program's first one."""
    for row in tl.static_range((M - 1) // EACH * EACH):
        if row < begin_row:
            keys, values = _put_row(
                keys, values, memory, row, (before + row) % W, mine, start, d, M, WIDTH, STRIDE, PTX
            )
    return keys, values


@triton.jit
def _attend_ahead_kernel(
    qkv_ptr, keys_ptr, values_ptr, position_ptr, cos_ptr, sin_ptr, means_ptr, totals_ptr,
    new_ptr, instead_ptr, W, HEADS, scale, eps,
    M: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, PASSES: tl.constexpr,
    SEVERAL: tl.constexpr, WARPS: tl.constexpr, BYTES: tl.constexpr, PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    LANES: tl.constexpr = WIDTH // 8  # threads that share a slot
    STRIDE: tl.constexpr = 32 // LANES * WARPS
    SPAN: tl.constexpr = STRIDE * PASSES
    OF_ROW: tl.constexpr = (4 * WIDTH + 16) * WARPS  # shared-memory bytes, after the new vectors
    # a group of LANES threads has a slot, and a thread eight elements of its vectors
    thread = tl.arange(0, 32 * WARPS)
    warp, lane = thread // 32, thread % 32
    d = 8 * (lane % LANES)
    head, part = tl.program_id(0), tl.program_id(1)
    start = EACH * tl.program_id(2)
    before = tl.load(position_ptr)
    # in a ring that is not full, the slots of the new bytes are empty
    filled, seen = tl.minimum(before, W), tl.minimum(before + tl.minimum(start + EACH, M), W)
    # the first span of this part; parts take spans in turns
    first, apart = part * SPAN, SPAN * tl.num_programs(1)
    if first < seen:
        # issue the loads that do not depend on the previous kernel, then wait for it
        mine = first + thread // LANES
        at = head.to(tl.int64) * W * HALF + d // 2  # in words of two elements
        keys_of_head, values_of_head = keys_ptr + at, values_ptr + at
        keys, values = load_span(
            keys_of_head, values_of_head, mine, filled, W, WIDTH, STRIDE, PASSES, PTX
        )
        vectors, angles = _vectors_of(thread, M, WIDTH), ()
        for i in tl.static_range(len(vectors)):
            place = before + vectors[i] % M
            angles = angles + (rotated_angles(cos_ptr, sin_ptr, place, d, HALF, PTX),)  # noqa: RUF005
        memory = ptx.memory_of(instead_ptr, thread, BYTES, PTX)
        sums_at = memory + 6 * WIDTH * M
        wait_for_last(OVERLAP, True)

        # stage the rotated queries and keys, and the values, of all new bytes in shared memory
        stores = (part == 0) & (start == 0)
        _take_new(qkv_ptr, new_ptr, angles, head, HEADS, eps, stores, memory, thread, M, WIDTH, PTX)
        tl.debug_barrier()
        # several spans: the sums of all bytes stay in registers, and each span is read once
        if SEVERAL:
            sums = ()
            for i in tl.static_range(EACH):
                row = tl.minimum(start + i, M - 1)
                adds_new = (before + row) % W // SPAN % tl.num_programs(1) == part
                _, row_sums, total = _begin_row(
                    memory, row, d, scale, adds_new, thread, M, WIDTH, PTX
                )
                sums = sums + row_sums + (total,)
            for begin in tl.range(first, seen, apart, disable_licm=True):
                span_memory, added = mine + (begin - first), ()
                # bring the span to the state that the first byte of this program attends to
                keys, values = _put_before(
                    keys, values, memory, before, start, W, span_memory, begin, d,
                    M, EACH, WIDTH, STRIDE, PTX,
                )  # fmt: skip
                for i in tl.static_range(EACH):
                    row = tl.minimum(start + i, M - 1)
                    slot = (before + row) % W
                    # attend from a byte, then store the byte itself in its slot for the next one
                    q = ptx.unpair_four(ptx.read_four(memory + (2 * WIDTH * row + 2 * d), PTX))
                    row_sums, total = add_span(
                        sums[9 * i : 9 * i + 8], sums[9 * i + 8], keys, values, q, span_memory,
                        tl.minimum(before + row + 1, W), slot, scale, WIDTH, STRIDE, True, PTX,
                    )  # fmt: skip
                    added = added + row_sums + (total,)
                    if i + 1 < EACH:
                        keys, values = _put_row(
                            keys, values, memory, row, slot, span_memory, begin, d,
                            M, WIDTH, STRIDE, PTX,
                        )  # fmt: skip
                sums = added
                # load the next span after the last use of this one, to the same registers
                keys, values = load_span(
                    keys_of_head, values_of_head, span_memory + apart, filled, W,
                    WIDTH, STRIDE, PASSES, PTX,
                )  # fmt: skip
            for i in tl.static_range(EACH):
                to = sums_at + (OF_ROW * i + OF_ROW // WARPS * warp)
                write_sums(to, sums[9 * i : 9 * i + 8], sums[9 * i + 8], d, lane, WIDTH, PTX)
        else:  # one span, which stays in registers: finish one byte after another
            keys, values = _put_before(
                keys, values, memory, before, start, W, mine, first, d, M, EACH, WIDTH, STRIDE, PTX
            )
            for i in tl.static_range(EACH):
                row = tl.minimum(start + i, M - 1)
                slot = (before + row) % W
                adds_new = slot // SPAN % tl.num_programs(1) == part
                q, row_sums, total = _begin_row(
                    memory, row, d, scale, adds_new, thread, M, WIDTH, PTX
                )
                row_sums, total = add_span(
                    row_sums, total, keys, values, q, mine, tl.minimum(before + row + 1, W), slot,
                    scale, WIDTH, STRIDE, False, PTX,
                )  # fmt: skip
                to = sums_at + (OF_ROW * i + OF_ROW // WARPS * warp)
                write_sums(to, row_sums, total, d, lane, WIDTH, PTX)
                if i + 1 < EACH:
                    keys, values = _put_row(
                        keys, values, memory, row, slot, mine, first, d, M, WIDTH, STRIDE, PTX
                    )
        tl.debug_barrier()
        # add up the warps, and store the mean and the total of each byte, one element per thread
        for turn in tl.static_range(0, EACH * WIDTH, 32 * WARPS):
            i = (turn + thread) // WIDTH
            local = tl.minimum(i, EACH - 1)
            row = tl.minimum(start + local, M - 1)
            place = (row * tl.num_programs(1) + part) * HEADS + head
            store_part(
                sums_at + OF_ROW * local, means_ptr, totals_ptr, place, thread % WIDTH, i < EACH,
                WIDTH, WARPS, PTX,
            )  # fmt: skip


@triton.jit(do_not_specialize=["K", "span"])
@no_type_check
def _average_parts_kernel(
    values_ptr, totals_ptr, position_ptr, y_ptr, K, span,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Average the parts of each byte (see `AttentionParts`), eight elements per thread."""
    row = tl.program_id(1)
    u = tl.minimum(32 * tl.program_id(0) + tl.arange(0, 32), K // 8 - 1)  # the last one again
    filled = tl.minimum(tl.cdiv(tl.load(position_ptr) + row + 1, span), PARTS) + 0 * u
    wait_for_last(OVERLAP, True)
    # load the filled parts of a byte at once; others count 0
    octets, shares = (), ()
    for part in tl.static_range(PARTS):
        place, some = row * PARTS + part, filled > part
        head_totals_ptr = totals_ptr + (place * (K // WIDTH) + 8 * u // WIDTH)
        part_ptr = values_ptr + (place * (K // 4) + 2 * u)
        octets = octets + (ptx.load_where(part_ptr, some, False, PTX),)  # noqa: RUF005
        shares = shares + (tl.load(head_totals_ptr, mask=some, other=0, cache_modifier=".cg"),)  # noqa: RUF005
    # mean of the parts, weighted by their totals, in the same order as in `row_matmul`
    total = tl.zeros(u.shape, tl.float32)
    sums = (total,) * 8
    for part in tl.static_range(PARTS):
        total += shares[part]
        x, added = ptx.unpair_four(octets[part]), ()
        for j in tl.static_range(8):
            added = added + (sums[j] + x[j] * shares[part],)  # noqa: RUF005
        sums = added
    inverse = 1.0 / total
    for i in tl.static_range(4):
        pair = ptx.round_pair(sums[2 * i] * inverse, sums[2 * i + 1] * inverse, PTX)
        tl.store(y_ptr + (row * (K // 2) + 4 * u + i), pair)


def _attend_ahead_triton(
    qkv: Tensor, keys: Tensor, values: Tensor, new: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, eps: float, max_parts: int = MAX_PARTS,
) -> Tensor:  # fmt: skip
    rows, (heads, window, width) = len(qkv), keys.shape
    parts, passes, span = sharing(window, width, max_parts)
    several = window > parts * span
    program_rows = rows_of_program(rows, heads * parts, num_processors(qkv), several=several)
    means = torch.empty(rows, parts, heads * width, dtype=qkv.dtype, device=qkv.device)
    totals = torch.empty(rows, parts, heads, dtype=torch.float32, device=qkv.device)
    y = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    aligned = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (qkv, cos, sin))
    qkv, cos, sin = (x.view(torch.int32) for x in aligned)
    size = 6 * width * rows + program_rows * WARPS * (4 * width + 16)
    room = 0 if ptx.HAS_PTX else heads * parts * size
    instead = torch.empty(room, dtype=torch.uint8, device=qkv.device) if room else totals
    _attend_ahead_kernel[(heads, parts, triton.cdiv(rows, program_rows))](
        qkv, keys.view(torch.int32), values.view(torch.int32), position, cos, sin,
        means.view(torch.int16), totals, new.view(torch.int32), instead,
        window, heads, width**-0.5, eps,
        M=rows, EACH=program_rows, WIDTH=width, PASSES=passes, SEVERAL=several, WARPS=WARPS,
        BYTES=size, PTX=ptx.HAS_PTX, num_warps=WARPS, maxnreg=REGISTERS, **overlap_options(qkv),
    )  # fmt: skip
    _average_parts_kernel[(triton.cdiv(heads * width, 256), rows)](
        means.flatten().view(torch.int64), totals, position, y.view(torch.int32),
        heads * width, span,
        PARTS=parts, WIDTH=width, PTX=ptx.HAS_PTX, num_warps=1, **overlap_options(qkv),
    )  # fmt: skip
    return y


def rows_of_program(rows: int, parts: int, processors: int, *, several: bool) -> int:
    """Choose the number of bytes per program that was fastest on an H100.

        Few if multiprocessors, which run two programs each, were idle otherwise; two if a program
    has several spans, because its registers hold the sums of all its bytes.
    """
    programs = min(rows, max(-(-2 * processors // parts), -(-rows // 2) if several else 1))
    return -(-rows // programs)


def attend_in_turn(
    qkv: Tensor, keys: Tensor, values: Tensor, new: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, semaphores: Tensor, eps: float, one_program: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `attend_ahead` with one `decode_attention` per byte.

    Args:
        qkv: (M, 3, heads, d) float32 or bfloat16, contiguous.
        keys: as in `decode_attention`, with at least M slots; restored afterwards.
        values: like `keys`.
        new: (2, M, heads, d), set to the keys as they are to be stored, and the values.
        position: int32 scalar tensor: number of bytes before the first one.
        cos: as in `decode_attention`, like the following arguments.
        sin: likewise.
        semaphores: likewise.
        eps: likewise.
        one_program: likewise.

    Returns:
        (M, heads, d).
    """
    _check_turn(qkv, keys, values, new, position, cos, sin)

    def attend(row: Tensor, place: Tensor) -> Tensor:
        return decode_attention(row, keys, values, place, cos, sin, semaphores, eps, one_program)

    return torch.stack(_attend_in_turn(attend, qkv, keys, values, new, position))


_FIT = (f"1 <= M <= {MAX_AHEAD}", "M <= W", "D % 2 == 0")
_check_turn = compiled_check(
    "attend_in_turn",
    declared(
        "qkv: real[M, 3, H, D] dense; keys, values: real[H, W, D] dense; "
        "new: real[2, M, H, D] dense; position: int32[]; cos, sin: float32[P, D // 2] dense"
    ),
    _FIT,
)


def _keep_accepted_torch(rings: list[SpeculativeRings], position: Tensor, accepted: Tensor) -> None:
    for keys, values, new in rings:
        rows = new.shape[1]
        slots = slots_of(position, rows, keys.shape[1])
        stays = (torch.arange(rows, device=new.device) < accepted)[:, None]
        for ring, new_rows in zip((keys, values), new, strict=True):
            old = ring[:, slots]
            ring.index_copy_(1, slots, torch.where(stays, new_rows.transpose(0, 1), old))


@triton.jit
def _keep_accepted_kernel(
    addresses_ptr, sizes_ptr, position_ptr, accepted_ptr, M,
    WORD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    ring, row = tl.program_id(0), tl.program_id(1)
    to = tl.load(addresses_ptr + 2 * ring).to(tl.pointer_type(WORD))
    source = tl.load(addresses_ptr + 2 * ring + 1).to(tl.pointer_type(WORD))
    heads, window = tl.load(sizes_ptr + 3 * ring), tl.load(sizes_ptr + 3 * ring + 1)
    width = tl.load(sizes_ptr + 3 * ring + 2)
    wait_for_last(OVERLAP)
    if row < tl.load(accepted_ptr):
        slot = (tl.load(position_ptr) + row) % window
        for start in range(0, heads * width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            some, head = at < heads * width, at // width
            vector = tl.load(source + (row * heads * width + at), mask=some, other=0)
            target = (head.to(tl.int64) * window + slot) * width + at % width
            tl.store(to + target, vector, mask=some)


class Table(NamedTuple):
    """Addresses of several rings, for one launch that stores vectors in all of them."""

    rings: list[SpeculativeRings]
    """Rings that the addresses point to; they must not be reallocated."""
    addresses: Tensor
    """(2 R, 2) int64: the addresses of each ring and of its new vectors."""
    sizes: Tensor
    """(2 R, 3) int32: heads, slots and width of each ring."""


def table_of(rings: list[SpeculativeRings]) -> Table:
    """Build the table of several rings with the same number and dtype of new vectors."""
    addresses: list[tuple[int, int]] = []
    sizes: list[tuple[int, ...]] = []
    for keys, values, new in rings:
        for ring, new_rows in zip((keys, values), new, strict=True):
            addresses.append((ring.data_ptr(), new_rows.data_ptr()))
            sizes.append(tuple(ring.shape))
    device = rings[0].keys.device
    return Table(
        rings,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.tensor(sizes, dtype=torch.int32, device=device),
    )


def _keep_accepted_triton(table: Table, position: Tensor, accepted: Tensor) -> None:
    new = table.rings[0].new
    rows, word = new.shape[1], tl.int16 if new.element_size() == 2 else tl.int32
    _keep_accepted_kernel[(len(table.addresses), rows)](
        table.addresses, table.sizes, position, accepted, rows,
        WORD=word, BLOCK=1024, num_warps=4, **overlap_options(new),
    )  # fmt: skip


def keep_accepted_(table: Table, position: Tensor, accepted: Tensor) -> None:
    """Store the keys and values of accepted positions in their rings, in place.

    Args:
        table: the rings and their new vectors.
        position: int32 scalar tensor: position of the first new vector.
        accepted: int32 scalar tensor: number of accepted vectors.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    for rings in table.rings:
        KEEP_ACCEPTED.check(*rings, position, accepted)
    if backend_of(table.addresses) == "triton":
        _keep_accepted_triton(table, position, accepted)
    else:
        _keep_accepted_torch(table.rings, position, accepted)


attend_ahead = Operation(
    "attend_ahead", _attend_ahead_triton, _attend_ahead_torch,
    "qkv: bfloat16[M, 3, H, D] dense; keys, values: bfloat16[H, W, D] dense; new: bfloat16[2, M, "
    "H, D] dense; position: int32[]; cos, sin: float32[P, D // 2] dense; eps; max_parts",
    where=(*_FIT, "M > 1", f"D in {WIDTHS}", ALIGNED),
)  # fmt: skip
"""Attend from several new bytes; each head is computed in parts and averaged.

Args:
    qkv: (M, 3, heads, d) bfloat16, contiguous, of 2 to 8 bytes, d 64 or 128.
    keys: (heads, W, d) bfloat16, of at least M slots, as of `attend_parts`; not changed.
    values: like `keys`.
    new: (2, M, heads, d), set to the keys as they are to be stored, and the values.
    position: int32 scalar tensor: number of bytes before the first one.
    cos: (P, d / 2) float32, contiguous.
    sin: like `cos`.
    eps: added to the mean square.
    max_parts: maximum number of parts per head.

Returns:
    (M, heads * d) bfloat16, with the bits that a product computes from `attend_parts`.

Raises:
    ValueError: a dtype or a shape does not fit.
"""


def _take_one_pair(run: Callable[[Table, Tensor, Tensor], None]) -> Callable:
    """Wrap an implementation so that it takes one pair of rings and returns it."""

    def run_pair(
        keys: Tensor, values: Tensor, new: Tensor, position: Tensor, accepted: Tensor
    ) -> tuple[Tensor, Tensor]:
        run(table_of([SpeculativeRings(keys, values, new)]), position, accepted)
        return keys, values

    return run_pair


KEEP_ACCEPTED = Operation(
    "keep_accepted", _take_one_pair(_keep_accepted_triton),
    _take_one_pair(lambda table, *arguments: _keep_accepted_torch(table.rings, *arguments)),
    "keys, values: real[H, W, D] dense; new: real[2, M, H, D] dense; position, accepted: int32[]",
)  # fmt: skip

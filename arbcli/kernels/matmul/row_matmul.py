"""Product of a row of one text with fused norm, gate and sum: y = added + gate(rms_norm(x) @ w.T).

rms_norm(x) = x / sqrt(mean(x**2) + eps) has no weights; gate(a, b) = silu(a) * b, with a and b the
two halves of the product. Norm, gate and sum are optional. The division of the norm is applied
last, to the products. `prepacked` describes the layout of w. Several positions of a text are up to
8 rows; each has the same bits as alone, so bytes that are processed together have the same results
as one by one.

Arithmetic. Tensor cores multiply int8 at the highest rate, with exact sums. So x is rounded to 15
bits, with one power of two for 32 elements: the error of an element is at most 2**-14 of the
largest of its 32, and elements of at least 2**-6 of it are exact. An element is split into two
signed bytes, in two columns of the instruction. Codes are masked, not shifted: the factor 4**i of
plane i goes into the powers of two. Codes are T + 1, so a sum of x is subtracted from the sums of
the lower bytes. All of this is in integers, except one float32 multiply-add per 32 columns. If an
element of x is not finite, every result is NaN.

In the instruction of bytes, of 16 rows by 8 columns, the columns are for up to four blocks of 128
of a single row of x, or for a block of up to four rows:

    column             0      1      2      3      4      5      6      7
    one row: x of     block 0       block 1       block 2       block 3      upper and lower bytes
             w of     thread c = 0        1             2             3      its own block of a row
    rows:    x of      row 0         row 1         row 2         row 3       upper and lower bytes
             w of     thread 4 r + c: bytes j = c of one block, of rows r and r + 8

Reason: one row of x would leave six columns empty. With four blocks abreast a thread loads 64 bytes
of codes of rows r and r + 8 that only it needs, and x is 0 where column and block differ. Rows of x
have their own columns instead, so that codes are loaded and masked once for all of them. Integer
sums are exact in any order; float32 sums have one order, that of a single row: over the planes of a
block, the blocks of a step, the steps of a row, and the squares of a row. Registers hold w instead
of shared memory, because w is loaded before the wait for the previous kernel, when registers are
free, and each byte is used once, by one thread.

Work. A program computes several tiles of 16 rows of w. Its threads load all its pieces to registers
before they wait for the kernel that computes x, then round x to shared memory, as many rows as fit.
A warp multiplies 16 rows by a *step* of one or four blocks. The part of a row whose squares one
warp sums is a task, whatever the number of rows, so that warps can share the tasks of all rows.
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_parts import AttentionParts
from arbcli.kernels.matmul.prepacked import (
    BLOCK,
    MAX_COLUMNS,
    PIECE_BYTES,
    PREPACKED_SCHEMA,
    Prepacked,
    prepacked_native,
    prepacked_torch,
)
from arbcli.kernels.matmul.swizzled import MAX_ROWS, few_rows_fit
from arbcli.kernels.runtime import ptx
from arbcli.kernels.runtime.backend import backend_of, num_processors
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

SHARED_BYTES = 47 << 10
"""Shared memory per program in bytes, for rows of x, their sums and their squares."""
HALF = tl.constexpr(144)
"""Shared-memory bytes of the upper or lower bytes of x per block, padded: threads read both halves
of four blocks at a time, which must be in different banks."""
TABLE = tl.constexpr(32)
"""Bytes of the table of a block of x: the sums of its four planes, and their units."""
SUMS = tl.constexpr(64)
"""Bytes of the sums per step: 16 float32."""
APART = tl.constexpr(32)
"""Padding in bytes between rows of x in shared memory, and between their sums: threads access four
rows at a time, which must be in different banks."""
_ROWS_OF_INSTRUCTION = tl.constexpr(4)
"""Rows of x per instruction."""
_OCTETS = tl.constexpr(2)
"""Groups of eight elements of several rows that a thread rounds at a time; more need too many
registers."""
_LEAST = tl.constexpr(20)
"""Minimum biased exponent of 32 elements, which keeps units normal float32."""
_PARTS_AT_ONCE = tl.constexpr(2)
"""Parts of attention that a thread loads at a time; more need too many registers."""
_NOT_FINITE = tl.constexpr(0x7F80)
"""Bits of bf16 infinity; larger bits are NaN."""
_ROUND = tl.constexpr(12582912.0 + 0x8080)
"""Added to a float, leaves its nearest integer plus 0x8080 in the last 16 bits."""
_MAX_PAIRS = tl.constexpr("max.NaN.bf16x2 $0, $1, $2;")
_SPLIT = tl.constexpr("""{
.reg .b32 first, second;
prmt.b32 first, $2, $3, 0x5410;
prmt.b32 second, $4, $5, 0x5410;
prmt.b32 $0, first, second, 0x6420;
prmt.b32 $1, first, second, 0x7531;
xor.b32 $0, $0, 0x80808080;
xor.b32 $1, $1, 0x80808080;
}""")
_SUM_BYTES = tl.constexpr("""{
.reg .b32 ones;
mov.b32 ones, 0x01010101;
dp4a.s32.s32 $0, $1, ones, $2;
}""")


@triton.constexpr_function
def _plane_ptx(plane):
    mask, scale = 0x03030303 << 2 * plane, "and.b32 {}, {}, 0xFFFF0000;\n"
    if plane % 2 == 0:
        scale = "shl.b32 {}, {}, 16;\n"
    masked = "".join(f"and.b32 ${i}, ${i + 6}, {mask:#x};\n" for i in range(4))
    return masked + scale.format("$4", "$10") + scale.format("$5", "$11")


def _row_matmul_torch(
    x: Tensor | AttentionParts, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows = x.combine()[None] if isinstance(x, AttentionParts) else x
    return prepacked_torch(rows, pieces, out_features, in_features, gated, eps, added, dtype)


def _row_matmul_native(
    x: Tensor | AttentionParts, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows = x.combine()[None] if isinstance(x, AttentionParts) else x
    return prepacked_native(rows, pieces, out_features, in_features, gated, eps, added, dtype)


@triton.jit
def _max_pairs(a, b, PTX: tl.constexpr):
    """Compute the maximum of two pairs of unsigned bf16; NaN propagates."""
    if PTX:
        return tl.inline_asm_elementwise(
            _MAX_PAIRS, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    low = tl.maximum(a & 0xFFFF, b & 0xFFFF)
    return low | tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)


@triton.jit
def _largest(four, PTX: tl.constexpr):
    """Compute the largest magnitude of eight bf16, as a pair whose maximum is the result."""
    a = _max_pairs(four[0] & 0x7FFF7FFF, four[1] & 0x7FFF7FFF, PTX)
    return _max_pairs(a, _max_pairs(four[2] & 0x7FFF7FFF, four[3] & 0x7FFF7FFF, PTX), PTX)


@triton.jit
def _split_bytes(a, b, c, d, PTX: tl.constexpr):
    """Split integers n, given as n + 0x8080 in the last 16 bits, to n = 256 high + low.

    Returns:
        The lower bytes and the upper bytes of all four, in -128..127.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _SPLIT, "=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )
    low = (a & 0xFF) | ((b & 0xFF) << 8) | ((c & 0xFF) << 16) | (d << 24)
    a, b, c, d = a >> 8, b >> 8, c >> 8, d >> 8
    high = (a & 0xFF) | ((b & 0xFF) << 8) | ((c & 0xFF) << 16) | (d << 24)
    return low ^ -0x7F7F7F80, high ^ -0x7F7F7F80


@triton.jit
def _round_four(a, b, inverse, PTX: tl.constexpr):
    """Round two pairs of bf16, times a power of two, to integers below 2**15, in two bytes each."""
    x, bits = ptx.unpair(a) + ptx.unpair(b), ()
    for i in tl.static_range(4):
        bits = bits + (tl.fma(x[i], inverse, _ROUND).to(tl.int32, bitcast=True),)  # noqa: RUF005
    return _split_bytes(bits[0], bits[2], bits[1], bits[3], PTX)


@triton.jit
def _sum_bytes(word, total, PTX: tl.constexpr):
    """Add four signed bytes to a total."""
    if PTX:
        return tl.inline_asm_elementwise(
            _SUM_BYTES, "=r,r,r", [word, total], dtype=tl.int32, is_pure=True, pack=1
        )
    for byte in tl.static_range(4):
        total += (word << (24 - 8 * byte)) >> 24
    return total


@triton.jit
def _largest_of_four(values, PTX: tl.constexpr):
    """Compute the maximum of each pair of a tuple over four neighbouring threads."""
    for turn in tl.static_range(2):
        others, maxima = (), ()
        for t in tl.static_range(len(values)):
            others = others + (ptx.shuffle_xor(values[t], 1 << turn, PTX),)  # noqa: RUF005
        for t in tl.static_range(len(values)):
            maxima = maxima + (_max_pairs(values[t], others[t], PTX),)  # noqa: RUF005
        values = maxima
    return values


@triton.jit
def _round_x(octets, units, x_at, tables_at, PTX: tl.constexpr):
    """Round groups of eight elements of x to shared memory; four neighbouring threads have a plane.

    Args:
        octets: groups of eight elements per thread, as four int32 each.
        units: index of each group in x.
        x_at: for each group, the shared-memory address of its x; bytes of plane i and j are at
            32 j + 8 i.
        tables_at: addresses of the tables of its blocks: sums of planes, then their units.
        PTX: whether the compiler accepts PTX.
    """
    TURNS: tl.constexpr = len(octets)
    zero = tl.zeros_like(units[0])
    largest, exponents, totals = (), (), ()
    # largest magnitude of 32 elements: of a thread's eight, then of four threads
    for t in tl.static_range(TURNS):
        largest = largest + (_largest(octets[t], PTX),)  # noqa: RUF005
    largest = _largest_of_four(largest, PTX)
    for t in tl.static_range(TURNS):
        u, four = units[t], octets[t]
        maximum = tl.maximum(largest[t] & 0xFFFF, (largest[t] >> 16) & 0xFFFF)
        exponent = tl.maximum(maximum >> 7, _LEAST)
        inverse = ((267 - exponent) << 23).to(tl.float32, bitcast=True)  # 2**14 / 2**(e + 1)
        exponents = exponents + (tl.where(maximum >= _NOT_FINITE, -1, exponent),)  # noqa: RUF005
        # integers below 2**15, split to bytes; the sum is what codes T + 1 add too much
        low_0, high_0 = _round_four(four[0], four[1], inverse, PTX)
        low_1, high_1 = _round_four(four[2], four[3], inverse, PTX)
        upper = _sum_bytes(high_1, _sum_bytes(high_0, zero, PTX), PTX)
        total = _sum_bytes(low_1, _sum_bytes(low_0, upper << 8, PTX), PTX)
        totals = totals + (total,)  # noqa: RUF005
        at = x_at[t] + (2 * HALF * (u // 16) + 32 * (u % 4) + 8 * (u // 4 % 4))
        ptx.write_two(at, high_0, high_1, PTX)
        ptx.write_two(at + HALF, low_0, low_1, PTX)
    # the table of a block: sums and units of planes, with the factor 4**i of their codes
    totals = ptx.sum_across(totals, 1, 4, PTX)
    for t in tl.static_range(TURNS):
        u = units[t]
        plane = u // 4 % 4
        unit = tl.where(exponents[t] < 0, 0x7FC00000, (exponents[t] - 13 - 2 * plane) << 23)
        to, first = tables_at[t] + (TABLE * (u // 16) + 4 * plane), u % 4 == 0
        ptx.write_where(to, totals[t] << (2 * plane), first, PTX)
        ptx.write_where(to + 16, unit, first, PTX)


@triton.jit
def _average_parts(values_ptr, totals_ptr, parts, u, K, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Average the u-th eight elements of the parts of attention (see `AttentionParts`)."""
    # sum of values times totals, over those parts that are filled
    total = tl.zeros(u.shape, tl.float32)
    sums = (total,) * 8
    for start in range(0, parts, _PARTS_AT_ONCE):
        octets, shares = (), ()
        for i in tl.static_range(_PARTS_AT_ONCE):  # issue all loads before the first use
            part = tl.minimum(start + i, parts - 1)
            head_totals_ptr = totals_ptr + (part * (K // WIDTH) + 8 * u // WIDTH)
            octets = octets + (ptx.load_new(values_ptr + (part * (K // 4) + 2 * u), PTX),)  # noqa: RUF005
            shares = shares + (tl.load(head_totals_ptr, cache_modifier=".cg"),)  # noqa: RUF005
        for i in tl.static_range(_PARTS_AT_ONCE):
            share = tl.where(start + i < parts, shares[i], 0.0)
            total += share
            x, added = ptx.unpair_four(octets[i]), ()
            for j in tl.static_range(8):
                added = added + (sums[j] + x[j] * share,)  # noqa: RUF005
            sums = added
    inverse, four = 1.0 / total, ()
    for i in tl.static_range(4):
        pair = ptx.round_pair(sums[2 * i] * inverse, sums[2 * i + 1] * inverse, PTX)
        four = four + (pair,)  # noqa: RUF005
    return four


@triton.jit
def _load_x(
    x_ptr, totals_ptr, parts, u, K, WIDTH: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr
):
    """Load the u-th eight elements of a row of x, as four int32; zeros beyond K."""
    if WIDTH > 0:
        octet = _average_parts(x_ptr, totals_ptr, parts, tl.minimum(u, K // 8 - 1), K, WIDTH, PTX)
        four = ()
        for i in tl.static_range(4):
            four = four + (octet[i] if WHOLE else tl.where(8 * u < K, octet[i], 0),)  # noqa: RUF005
    elif WHOLE:
        four = ptx.load_new(x_ptr + 2 * u, PTX)
    else:
        four = ptx.load_where(x_ptr + 2 * u, 8 * u < K, False, PTX)
    return four


@triton.jit
def _sum_of_squares(four):
    """Sum the squares of eight elements, given as four int32."""
    x = ptx.unpair_four(four)
    even, odd = x[0] * x[0], x[1] * x[1]
    for i in tl.static_range(2, 8, 2):
        even += x[i] * x[i]
        odd += x[i + 1] * x[i + 1]
    return even + odd


@triton.jit
def _task_of(number, warp, ROWS: tl.constexpr, WARPS: tl.constexpr, SQUARES: tl.constexpr):
    """Compute the row and the first group of a warp's task; clamp to the last task."""
    if ROWS == 1 and SQUARES == WARPS:
        return 0, warp
    task = tl.minimum(warp + WARPS * number, ROWS * SQUARES - 1)
    return task // SQUARES if ROWS > 1 else 0, task % SQUARES


@triton.jit
def _take_octets(
    x_ptr, totals_ptr, parts, K, x_at, tables_at, thread, first: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr, SQUARES: tl.constexpr, GROUPS: tl.constexpr,
    OF_ROW: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Round groups of eight from `first` on to shared memory, and return their squares."""
    TURNS: tl.constexpr = (GROUPS + SQUARES - 1) // SQUARES
    # warps of a single row skip the groups beyond it: nothing to clamp or to mask
    SKIPS: tl.constexpr = PTX and ROWS == 1 and SQUARES == WARPS
    octets, some, units, to, tables = (), (), (), (), ()
    # issue the loads of all groups before the first is used
    for k in tl.static_range(first, first + COUNT):
        row, group = _task_of(k // TURNS, thread // 32, ROWS, WARPS, SQUARES)
        group += SQUARES * (k % TURNS)
        clamped = tl.minimum(group, GROUPS - 1)
        u = thread + 32 * WARPS * k if SKIPS else 32 * clamped + thread % 32
        octet = _load_x(x_ptr + row * (K // 4), totals_ptr, parts, u, K, WIDTH, WHOLE, PTX)
        octets, some, units = octets + (octet,), some + (group < GROUPS,), units + (u,)  # noqa: RUF005
        to, tables = to + (x_at + OF_ROW * row,), tables + (tables_at + OF_ROW * row,)  # noqa: RUF005
    _round_x(octets, units, to, tables, PTX)
    squares = ()
    for k in tl.static_range(COUNT):
        octet_squares = _sum_of_squares(octets[k])
        if GROUPS % SQUARES > 0 and not SKIPS:
            octet_squares = tl.where(some[k], octet_squares, 0.0)
        squares = squares + (octet_squares,)  # noqa: RUF005
    return squares


@triton.jit
def _take_rows(
    x_ptr, totals_ptr, parts, K, x_at, tables_at, squares_at, thread,
    ROWS: tl.constexpr, NORM: tl.constexpr, WARPS: tl.constexpr, SQUARES: tl.constexpr,
    GROUPS: tl.constexpr, OF_ROW: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Round rows of x to shared memory, and write the sums of squares of each task.

    A task is the part of a row that one of `SQUARES` warps rounds, if these share a single row:
        groups of 32 eights, `SQUARES` groups apart.
    """
    TURNS: tl.constexpr = (GROUPS + SQUARES - 1) // SQUARES
    TASKS: tl.constexpr = (ROWS * SQUARES + WARPS - 1) // WARPS
    squares, zero = (), tl.zeros(thread.shape, tl.float32)
    if ROWS == 1:  # all groups at once, except those of the last turn, which some warps skip
        FULL: tl.constexpr = GROUPS // SQUARES
        row_squares = zero
        if FULL > 0:
            all_squares = _take_octets(
                x_ptr, totals_ptr, parts, K, x_at, tables_at, thread, 0, FULL,
                ROWS, WARPS, SQUARES, GROUPS, OF_ROW, WIDTH, WHOLE, PTX,
            )  # fmt: skip
            for turn in tl.static_range(FULL):
                row_squares += all_squares[turn]
        if FULL < TURNS:
            # compared as indices of eights, which are computed anyway
            some = 32 * ptx.warp_number() + 32 * SQUARES * FULL < 32 * GROUPS if PTX else True
            if some:
                row_squares += _take_octets(
                    x_ptr, totals_ptr, parts, K, x_at, tables_at, thread, FULL, 1,
                    ROWS, WARPS, SQUARES, GROUPS, OF_ROW, WIDTH, WHOLE, PTX,
                )[0]  # fmt: skip
        squares = (row_squares,)
    else:
        all_squares = ()
        for first in tl.static_range(0, TASKS * TURNS, _OCTETS):
            all_squares = all_squares + _take_octets(
                x_ptr, totals_ptr, parts, K, x_at, tables_at, thread, first,
                min(_OCTETS, TASKS * TURNS - first),
                ROWS, WARPS, SQUARES, GROUPS, OF_ROW, WIDTH, WHOLE, PTX,
            )  # fmt: skip
        for task in tl.static_range(TASKS):
            task_squares = zero
            for turn in tl.static_range(TURNS):
                task_squares += all_squares[TURNS * task + turn]
            squares = squares + (task_squares,)  # noqa: RUF005
    if NORM:
        for turn in tl.static_range(5):  # over the threads of a warp
            others = ()
            for task in tl.static_range(TASKS):
                others = others + (ptx.shuffle_xor(squares[task], 1 << turn, PTX),)  # noqa: RUF005
            squares = _sum_pairwise(squares, others)
        for task in tl.static_range(TASKS):
            row, group = _task_of(task, thread // 32, ROWS, WARPS, SQUARES)
            ptx.write(squares_at + 4 * (_padded(SQUARES) * row + group), squares[task], PTX)


@triton.constexpr_function
def _padded(count):
    """Round up the number of words of a row's squares, which are read in fours."""
    return -(-count // 4) * 4


@triton.jit
def _sum_pairwise(a, b):
    sums = ()
    for i in tl.static_range(len(a)):
        sums = sums + (a[i] + b[i],)  # noqa: RUF005
    return sums


@triton.constexpr_function
def _mask_of(plane):
    """Return the mask of a plane's codes in a word."""
    return (0x03030303, 0x0C0C0C0C, 0x30303030, -0x3F3F3F40)[plane]


@triton.jit
def _multiply_row(
    codes, scales, x_at, tables_at, block, thread, ABREAST: tl.constexpr, PTX: tl.constexpr
):
    """Multiply 16 rows by a step of a single row of x; return sums of rows r and r + 8.

    With four blocks abreast, thread 4 r + c has all codes of the c-th block. A column of the
    instruction is of one of the blocks, and x is 0 there for the threads of others. With one block,
    a thread has its codes j = c.
    """
    r, c = thread // 4 % 8, thread % 4
    nothing = tl.zeros_like(thread)
    is_mine = r // 2 == c if ABREAST == 4 else r < 2
    own_block = block + (c if ABREAST == 4 else 0)
    x_place = x_at + (2 * HALF * own_block + HALF * (r % 2) + (32 * c if ABREAST == 1 else 0))
    # integer sums of each plane, over the bytes j of the codes
    sums = ((nothing,) * 4,) * 4
    for j in tl.static_range(ABREAST):
        w = codes[j]
        x = ptx.read_four_where(x_place + 32 * j, is_mine, (nothing,) * 4, PTX)
        x = x + ptx.read_four_where(x_place + (32 * j + 16), is_mine, (nothing,) * 4, PTX)
        added = ()
        for i in tl.static_range(4):
            mask = _mask_of(i)
            masked = (w[0] & mask, w[1] & mask, w[2] & mask, w[3] & mask)
            plane_sum = ptx.add_byte_products(sums[i], masked, (x[2 * i], x[2 * i + 1]), PTX)
            added = added + (plane_sum,)  # noqa: RUF005
        sums = added
    # upper and lower bytes of x, minus its sum for codes T + 1, times scale and unit of a plane
    totals = ptx.read_four(tables_at + TABLE * own_block, PTX)
    units = ptx.read_four(tables_at + (TABLE * own_block + 16), PTX)
    upper, lower = tl.zeros(thread.shape, tl.float32), tl.zeros(thread.shape, tl.float32)
    for i in tl.static_range(4):
        four, unit = sums[i], units[i].to(tl.float32, bitcast=True)
        upper_sum = (four[0] << 8) + (four[1] - totals[i])
        lower_sum = (four[2] << 8) + (four[3] - totals[i])
        upper += upper_sum.to(tl.float32) * (ptx.unpair(scales[i // 2])[i % 2] * unit)
        lower += lower_sum.to(tl.float32) * (ptx.unpair(scales[2 + i // 2])[i % 2] * unit)
    if ABREAST == 4:
        for turn in tl.static_range(2):  # over the four blocks
            others = ptx.shuffle_xor(upper, 1 << turn, PTX), ptx.shuffle_xor(lower, 1 << turn, PTX)
            upper, lower = upper + others[0], lower + others[1]
    return upper, lower


@triton.jit
def _plane_of(codes, scales, plane: tl.constexpr, PTX: tl.constexpr):
    """Return the masked codes of a plane, and the scales of rows r and r + 8.

    It is recomputed for each group of rows of x, which keeps it out of registers.
    """
    first, second = scales[plane // 2], scales[2 + plane // 2]
    if PTX:
        CODE: tl.constexpr = _plane_ptx(plane)
        a, b, c, d, upper, lower = tl.inline_asm_elementwise(
            CODE, "=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [codes[0], codes[1], codes[2], codes[3], first, second],
            dtype=(tl.int32,) * 6, is_pure=False, pack=1,
        )  # fmt: skip
        masked = a, b, c, d
        upper, lower = upper.to(tl.float32, bitcast=True), lower.to(tl.float32, bitcast=True)
    else:
        mask = _mask_of(plane)
        masked = codes[0] & mask, codes[1] & mask, codes[2] & mask, codes[3] & mask
        upper, lower = ptx.unpair(first)[plane % 2], ptx.unpair(second)[plane % 2]
    return masked, upper, lower


@triton.jit
def _read_rows(x_at, tables_at, r, c, ROWS: tl.constexpr, OF_ROW: tl.constexpr, PTX: tl.constexpr):
    """Read a block of up to four rows of x, and the table entries for a thread's results."""
    at = x_at + (OF_ROW * tl.minimum(r // 2, ROWS - 1) + HALF * (r % 2) + 32 * c)
    if ROWS == _ROWS_OF_INSTRUCTION:
        x = ptx.read_four(at, PTX) + ptx.read_four(at + 16, PTX)
    else:
        nothing = (tl.zeros_like(r),) * 4
        x = ptx.read_four_where(at, r // 2 < ROWS, nothing, PTX)
        x = x + ptx.read_four_where(at + 16, r // 2 < ROWS, nothing, PTX)
    table_ptr = tables_at + OF_ROW * tl.minimum(c, ROWS - 1)
    return x, ptx.read_four(table_ptr, PTX), ptx.read_four(table_ptr + 16, PTX)


@triton.jit
def _multiply_block(
    codes, scales, x_at, tables_at, thread,
    ROWS: tl.constexpr, OF_ROW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiply a block of 16 rows of w by rows of x.

    Args:
        codes: four words per thread.
        scales: scales of rows r and r + 8, four words.
        x_at: shared-memory address of the block in the first row of x.
        tables_at: address of its table for the first row of x.
        thread: indices of the threads.
        ROWS: number of rows of x.
        OF_ROW: stride of rows of x in bytes.
        PTX: whether the compiler accepts PTX.

    Returns:
        For each four rows of x, the products of rows r and r + 8 of w with row c of these.
    """
    r, c = thread // 4 % 8, thread % 4
    nothing, zero = tl.zeros_like(r), tl.zeros(r.shape, tl.float32)
    row_inputs, sums = (), ()
    for first in tl.static_range(0, ROWS, _ROWS_OF_INSTRUCTION):
        some = _read_rows(
            x_at + OF_ROW * first, tables_at + OF_ROW * first, r, c,
            min(_ROWS_OF_INSTRUCTION, ROWS - first), OF_ROW, PTX,
        )  # fmt: skip
        row_inputs, sums = row_inputs + (some,), sums + (zero, zero)  # noqa: RUF005
    # a plane of codes is masked once, and multiplied by all rows of x
    for i in tl.static_range(4):
        masked, upper_scale, lower_scale = _plane_of(codes, scales, i, PTX)
        added = ()
        for k in tl.static_range(len(row_inputs)):
            x, totals, units = row_inputs[k]
            # the instruction multiplies bytes: those of the two halves of x are combined here
            four = ptx.add_byte_products((nothing,) * 4, masked, (x[2 * i], x[2 * i + 1]), PTX)
            unit = units[i].to(tl.float32, bitcast=True)
            upper = ((four[0] << 8) + (four[1] - totals[i])).to(tl.float32)
            lower = ((four[2] << 8) + (four[3] - totals[i])).to(tl.float32)
            added = added + (  # noqa: RUF005
                sums[2 * k] + upper * (upper_scale * unit),
                sums[2 * k + 1] + lower * (lower_scale * unit),
            )  # fmt: skip
        sums = added
    return sums


@triton.jit
def _do_step(
    codes, scales, step, sums_at, x_at, tables_at, thread,
    ROWS: tl.constexpr, PER_TILE: tl.constexpr, ABREAST: tl.constexpr, SINGLE: tl.constexpr,
    OF_ROW: tl.constexpr, OF_SUMS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute a warp's step for rows of x, and write its sums."""
    r, c = thread // 4 % 8, thread % 4
    block = step % PER_TILE * ABREAST
    if SINGLE:
        sums = _multiply_row(codes, scales[0], x_at, tables_at, block, thread, ABREAST, PTX)
    else:
        x_at, tables_at = x_at + 2 * HALF * block, tables_at + TABLE * block
        all_sums = ()
        for b in tl.static_range(ABREAST):
            block_sums = _multiply_block(
                codes[b], scales[b], x_at + 2 * HALF * b, tables_at + TABLE * b, thread,
                ROWS, OF_ROW, PTX,
            )  # fmt: skip
            all_sums = all_sums + (block_sums,)  # noqa: RUF005
        sums = all_sums[0]
        if ABREAST == 4:  # in the order of the shuffles of `_multiply_row`
            sums = _sum_pairwise(
                _sum_pairwise(all_sums[0], all_sums[1]), _sum_pairwise(all_sums[2], all_sums[3])
            )
    # sums of a step go to shared memory, where `_finish` adds those of a tile
    for k in tl.static_range(len(sums)):
        row = _ROWS_OF_INSTRUCTION * (k // 2) + c
        row_at = OF_SUMS * row if ROWS > 1 else 0
        at = sums_at + (row_at + SUMS * step + 4 * r + 32 * (k % 2))
        ptx.write_where(at, sums[k], row < ROWS, PTX)


@triton.constexpr_function
def width_of(blocks, abreast):
    """Compute the number of blocks of x in shared memory, rounded up to whole steps and warps."""
    steps = -(-blocks // abreast)
    return (steps * abreast + 1) // 2 * 2


@triton.jit
def _finish(
    sums_at, squares_at, share, eps, added,
    NORM: tl.constexpr, GATED: tl.constexpr, PER_TILE: tl.constexpr, SQUARES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Sum the steps of a row, normalise, gate, and add `added`.

    Address `squares_at` has `SQUARES` sums of squares.
    """
    # even and odd steps apart: two chains of additions
    y, odd = tl.zeros(added.shape, tl.float32), tl.zeros(added.shape, tl.float32)
    for k in tl.static_range(0, PER_TILE, 2):
        y += ptx.read_float(sums_at + SUMS * k, PTX)
        if k + 1 < PER_TILE:
            odd += ptx.read_float(sums_at + SUMS * (k + 1), PTX)
    y += odd
    # the norm is a factor of the product: the mean square was summed while x was rounded
    if NORM:
        total = tl.zeros(added.shape, tl.float32)
        for first in tl.static_range(0, SQUARES, 4):
            four = ptx.read_four(squares_at + 4 * first, PTX)
            for i in tl.static_range(min(4, SQUARES - first)):
                total += four[i].to(tl.float32, bitcast=True)
        y *= tl.rsqrt(total * share + eps)
    # gate and up of a result are eight threads apart
    if GATED:
        y = y / (1 + tl.exp(-y)) * ptx.shuffle_xor(y, 8, PTX)
    return y + added


@triton.jit
def _place_of(
    first, thread, first_tile, N, ROWS: tl.constexpr, HEIGHT: tl.constexpr, GATED: tl.constexpr
):
    """Return row of x, tile, row of the tile, column of the result, and whether a thread stores it.

    Sixteen threads have a unit, a tile of a row of x, of those from `first` on.
    """
    UNITS: tl.constexpr = ROWS * HEIGHT
    unit, row, row_of_x = first + thread // 16, thread % 16, 0
    tile_index, stores = unit, unit < UNITS
    if ROWS > 1:
        unit = tl.minimum(unit, UNITS - 1)
        row_of_x, tile_index = unit // HEIGHT, unit % HEIGHT
    n = (first_tile + tile_index) * (8 if GATED else 16) + (row % 8 if GATED else row)
    stores = stores & (n < N) & (row < (8 if GATED else 16))
    return row_of_x, tile_index, row, n, stores


@triton.jit(do_not_specialize=["N", "K", "tiles", "max_parts", "span"])
@no_type_check
def _row_matmul_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr, instead_ptr, totals_ptr, position_ptr,
    N, K, tiles, share, eps, max_parts, span,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr,
    OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, ABREAST: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCKS: tl.constexpr, WARPS: tl.constexpr, SQUARES: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr, BYTES: tl.constexpr, PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply `OF_PROGRAM` rows of x by `HEIGHT` tiles, `ROWS` rows at a time."""
    thread = tl.arange(0, 32 * WARPS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    PER_TILE: tl.constexpr = (BLOCKS + ABREAST - 1) // ABREAST
    STEPS: tl.constexpr = HEIGHT * PER_TILE
    WIDE: tl.constexpr = width_of(BLOCKS, ABREAST)
    OF_ROW: tl.constexpr = (2 * HALF + TABLE) * WIDE + APART
    OF_SUMS: tl.constexpr = SUMS * STEPS + APART
    UNITS: tl.constexpr = ROWS * HEIGHT
    SPREAD: tl.constexpr = M == 1 and ABREAST == 4
    first_tile = tl.program_id(0) * HEIGHT

    # load all weights of a warp; the padding of its last steps repeats others, times x of 0
    codes, scales = (), ()
    for turn in tl.static_range(0, STEPS, WARPS):
        step = tl.minimum(warp + turn, STEPS - 1)
        tile = tl.minimum(first_tile + step // PER_TILE, tiles - 1)
        step_codes, scales_of_step = (), ()
        for b in tl.static_range(ABREAST):  # all codes of block c, or codes j = c of each block
            block = tl.minimum(step % PER_TILE * ABREAST + (c if SPREAD else b), BLOCKS - 1)
            piece = pieces_ptr + ((tile * BLOCKS + block).to(tl.int64) * (PIECE_BYTES // 8) + 2 * r)
            step_codes = step_codes + (ptx.load_constant(piece + 16 * (b if SPREAD else c), PTX),)  # noqa: RUF005
            if b == ABREAST - 1 or not SPREAD:  # scales of a block after its codes
                scales_of_step = scales_of_step + (ptx.load_constant(piece + 64, PTX),)  # noqa: RUF005
        codes, scales = codes + (step_codes,), scales + (scales_of_step,)  # noqa: RUF005

    # shared memory: rows of x with their tables, then sums of steps, then squares of tasks
    x_at = ptx.memory_of(instead_ptr, thread, BYTES, PTX)
    tables_at = x_at + 2 * HALF * WIDE
    sums_at = x_at + OF_ROW * ROWS
    squares_at = sums_at + OF_SUMS * ROWS
    # places of the results of a thread, before the wait: see `_place_of`
    places = ()
    for first in tl.static_range(0, UNITS, 2 * WARPS):
        place = _place_of(first, thread, first_tile, N, ROWS, HEIGHT, GATED)
        places = places + (place,)  # noqa: RUF005
    parts = 1
    if WIDTH > 0:
        parts = tl.minimum(tl.cdiv(tl.load(position_ptr) + 1, span), max_parts)
    wait_for_last(OVERLAP, EARLY)

    first_row = 0
    if OF_PROGRAM < M:
        first_row = tl.minimum(OF_PROGRAM * tl.program_id(1), M - OF_PROGRAM)
    for batch in tl.range(0, (OF_PROGRAM + ROWS - 1) // ROWS, disable_licm=True):
        start = first_row + tl.minimum(ROWS * batch, OF_PROGRAM - ROWS)
        if batch > 0:
            tl.debug_barrier()
        # load what is added to the results, while x is on its way
        added = ()
        for first in tl.static_range(0, UNITS, 2 * WARPS):
            row_of_x, _, _, n, stores = places[first // (2 * WARPS)]
            unit_addend = tl.zeros(thread.shape, tl.float32)
            if ADD:
                unit_addend = tl.load(
                    added_ptr + ((start + row_of_x) * N + n), mask=stores, other=0,
                    cache_modifier=".cg",
                ).to(tl.float32)  # fmt: skip
            added = added + (unit_addend,)  # noqa: RUF005
        # round x to shared memory
        _take_rows(
            x_ptr + start * (K // 4), totals_ptr, parts, K, x_at, tables_at, squares_at, thread,
            ROWS, NORM, WARPS, SQUARES, WIDE // 2, OF_ROW, WIDTH, WHOLE, PTX,
        )  # fmt: skip
        tl.debug_barrier()
        # multiply: each warp takes every `WARPS`-th step
        for turn in tl.static_range(0, STEPS, WARPS):
            works = True
            if turn + WARPS > STEPS:
                works = ptx.warp_number() + turn < STEPS if PTX else True
            if works:
                _do_step(
                    codes[turn // WARPS], scales[turn // WARPS],
                    tl.minimum(warp + turn, STEPS - 1), sums_at, x_at, tables_at, thread,
                    ROWS, PER_TILE, ABREAST, M == 1, OF_ROW, OF_SUMS, PTX,
                )  # fmt: skip
        tl.debug_barrier()
        # sum the steps, and store
        for first in tl.static_range(0, UNITS, 2 * WARPS):
            finishes = ptx.warp_number() * 2 + first < UNITS if PTX else True
            if finishes:
                row_of_x, tile_index, row, n, stores = places[first // (2 * WARPS)]
                tile_index = tl.minimum(tile_index, HEIGHT - 1)
                y = _finish(
                    sums_at + (OF_SUMS * row_of_x + SUMS * PER_TILE * tile_index + 4 * row),
                    squares_at + 4 * _padded(SQUARES) * row_of_x, share, eps,
                    added[first // (2 * WARPS)], NORM, GATED, PER_TILE, SQUARES, PTX,
                )  # fmt: skip
                to = y_ptr + ((start + row_of_x) * N + n)
                tl.store(to, y.to(y_ptr.dtype.element_ty), mask=stores)


class Tiling(NamedTuple):
    """Partition of a product among programs and warps."""

    abreast: int
    """Blocks per step, 1 or 4; it fixes the order of sums, with `squares`."""
    height: int
    """Tiles per program."""
    warps: int
    """Number of warps per program, a multiple of 4; each takes every `warps`-th step."""
    registers: int = 128
    """Maximum number of registers per thread; fewer let the next kernel start earlier."""
    program_rows: int = 1
    """Rows of x per program."""
    rows: int = 1
    """Rows of x in shared memory at a time."""
    squares: int = 0
    """Tasks per row; 0 is the number of warps."""

    def shared_bytes(self, blocks: int) -> int:
        """Compute the bytes of shared memory per program, for x, the sums of steps, and squares."""
        steps = self.height * -(-blocks // self.abreast)
        x_bytes = (2 * HALF.value + TABLE.value) * width_of(blocks, self.abreast)
        row_bytes = x_bytes + SUMS.value * steps + 2 * APART.value
        return self.rows * (row_bytes + 4 * _padded(self.squares or self.warps))


def tiling_of(tiles: int, blocks: int, processors: int) -> Tiling:
    """Choose the tiling that was fastest for one row on an H200 for `1b`, or a similar one."""
    processor_tiles = -(-tiles // processors)
    if processor_tiles == 1 and blocks <= 16:  # one warp per block
        return Tiling(1, 1, max(4, triton.next_power_of_2(blocks)), 64)
    steps = -(-blocks // 4)
    max_warps = 8 if steps <= 16 else 16
    height = max(1, min(processor_tiles, 4, 2 * max_warps // steps))  # at most two steps per warp
    warps = max(4, min(max_warps, triton.next_power_of_2(height * steps)))
    return Tiling(4, height, warps, 96 if height == 4 else 128)


def tiling_of_rows(
    rows: int, row_tiling: Tiling, tiles: int, blocks: int, processors: int
) -> Tiling:
    """Choose the tiling that was fastest for `base` and `1b` on an H100; it does not affect bits.

    A program that is alone on a multiprocessor has one warp per step; if two programs share one,
        each has the warps of a single row. If multiprocessors would be idle, several programs of
        the same tiles divide the rows of x.
    """
    if rows == 1:
        return row_tiling
    steps = row_tiling.height * -(-blocks // row_tiling.abreast)
    shared = tiles > processors * row_tiling.height
    warps = max(8, row_tiling.warps if shared else min(16, triton.next_power_of_2(steps)))
    tiling = row_tiling._replace(
        warps=warps, registers=64 if row_tiling.abreast == 1 else 128,
        squares=min(row_tiling.warps, width_of(blocks, row_tiling.abreast) // 2),
    )  # fmt: skip
    fit = max(1, min(MAX_ROWS, SHARED_BYTES // tiling.shared_bytes(blocks)))
    program_rows = -(-rows // programs_of_tiles(rows, -(-tiles // row_tiling.height), processors))
    staged_rows = -(-program_rows // -(-program_rows // fit))
    return tiling._replace(program_rows=program_rows, rows=staged_rows)


def programs_of_tiles(rows: int, programs: int, processors: int) -> int:
    """Choose the number of programs that divide the rows of x, per program of tiles."""
    return max(1, min(rows, processors // programs))


def _row_matmul_triton(
    x: Tensor | AttentionParts, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype | None, early: bool = False,
) -> Tensor:  # fmt: skip
    rows = 1 if isinstance(x, AttentionParts) else len(x)
    y = torch.empty(rows, out_features, dtype=dtype, device=pieces.device)
    tiles, blocks = pieces.shape[:2]
    to = y if added is None else added.contiguous()
    totals, position, max_parts, span, width = to, to, 1, 1, 0
    if isinstance(x, AttentionParts):
        max_parts, heads = x.totals.shape
        totals, position, span, width = x.totals, x.position, x.span, in_features // heads
        x = x.values
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    processors = num_processors(x)
    tiling = tiling_of_rows(rows, tiling_of(tiles, blocks, processors), tiles, blocks, processors)
    grid = triton.cdiv(tiles, tiling.height), triton.cdiv(rows, tiling.program_rows)
    size = tiling.shared_bytes(blocks)
    instead = pieces if ptx.HAS_PTX else pieces.new_empty(grid[0] * grid[1] * size)
    _row_matmul_kernel[grid](
        x.flatten().view(torch.int64), pieces.view(torch.int64), to, y, instead, totals, position,
        out_features, in_features, tiles, 1 / in_features, 0.0 if eps is None else eps,
        max_parts, span,
        NORM=eps is not None, GATED=gated, ADD=added is not None, M=rows,
        OF_PROGRAM=tiling.program_rows, ROWS=tiling.rows, ABREAST=tiling.abreast,
        HEIGHT=tiling.height, BLOCKS=blocks, WARPS=tiling.warps,
        SQUARES=tiling.squares or tiling.warps, WIDTH=width,
        WHOLE=in_features == BLOCK * width_of(blocks, tiling.abreast), EARLY=early,
        BYTES=size, PTX=ptx.HAS_PTX, num_warps=tiling.warps, maxnreg=tiling.registers,
        **overlap_options(x),
    )  # fmt: skip
    return y


def row_matmul(
    x: Tensor | AttentionParts, weight: Prepacked, eps: float | None = None,
    added: Tensor | None = None, dtype: torch.dtype | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise rows, multiply by a prepacked matrix, gate the products and add `added`.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 8 rows, K a multiple of 8 and at most `MAX_COLUMNS`;
            or `AttentionParts`, which are averaged to one row. On a CPU float32 and more rows too.
        weight: the prepacked matrix.
        eps: added to the mean square; None omits the norm.
        added: like the result; None omits the sum.
        dtype: dtype of the result, bfloat16 or float32; the default is that of `x`.
        early: whether the next kernel may start before the previous one has ended: see `overlap`.

    Returns:
        (M, N) in `dtype`, from x rounded to 15 bits per group of 32 elements; accumulated in
        float32 and rounded once. Each row has the bits that it has alone. NaN in a row of which an
        element is not finite.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    row = x.values[:1] if isinstance(x, AttentionParts) else x
    inputs = *weight, eps, added, dtype or row.dtype
    ROW_MATMUL.check(row, *inputs)
    if isinstance(x, AttentionParts):
        x.check()
    if backend_of(row) == "triton":
        return _row_matmul_triton(x, *inputs, early)
    return ROW_MATMUL.chosen(row)(x, *inputs)


ROW_MATMUL = Operation(
    "row_matmul", _row_matmul_triton, _row_matmul_torch, PREPACKED_SCHEMA,
    native=_row_matmul_native, where=(*few_rows_fit(MAX_ROWS), f"in_features <= {MAX_COLUMNS}"),
)  # fmt: skip

"""Product of one row with fused norm, gate and sum: y = added + gate(rms_norm(x) @ w.T).

rms_norm(x) = x / sqrt(mean(x**2) + eps) has no weights; gate(a, b) = silu(a) * b, with a and b the
two halves of the product. Norm, gate and sum are optional. The division of the norm is applied
last, to the products. `prepacked` describes the layout of w.

Arithmetic. Tensor cores multiply int8 at the highest rate, with exact sums. So x is rounded to 15
bits, with one power of two for 32 elements: the error of an element is at most 2**-14 of the
largest of its 32, and elements of at least 2**-6 of it are exact. An element is split into two
signed bytes, in two columns of the instruction. Codes are masked, not shifted: the factor 4**i of
plane i goes into the powers of two. Codes are T + 1, so a sum of x is subtracted from the sums of
the lower bytes. All of this is in integers, except one float32 multiply-add per 32 columns. If an
element of x is not finite, every result is NaN.

In the instruction of bytes, of 16 rows by 8 columns, the columns are for up to four blocks of 128:

    column     0      1      2      3      4      5      6      7
    x of      block 0       block 1       block 2       block 3          upper and lower bytes
    w of      thread c = 0        1             2             3          its own block of each row

Reason: one row of x would leave six columns empty. With four blocks abreast a thread loads 64 bytes
of codes of rows r and r + 8 that only it needs, and x is 0 where column and block differ. Registers
hold w instead of shared memory, because w is loaded before the wait for the previous kernel, when
registers are free, and each byte is used once, by one thread.

Work. A program computes several tiles of 16 rows. Its threads load all its pieces to registers
before they wait for the kernel that computes x, then round x to shared memory. With four blocks
*abreast*, one per thread of a row, a warp multiplies 16 rows by 512 columns per step, otherwise by
128. Steps are summed in their order.
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_parts import AttentionParts
from arbcli.kernels.codec.warp_products import (
    HAS_PTX,
    add_byte_products,
    round_pair,
    unpair,
    unpair_four,
)
from arbcli.kernels.matmul.prepacked import (
    BLOCK,
    PIECE_BYTES,
    PREPACKED_ARGUMENTS,
    Prepacked,
    prepacked_native,
    prepacked_torch,
)
from arbcli.kernels.matmul.swizzled import few_rows_fit
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import num_processors, uses_triton
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.shared_memory import (
    memory_of,
    read_float,
    read_four,
    read_four_where,
    write,
    write_two,
    write_where,
)
from arbcli.kernels.runtime.threads import across, load_constant, load_new, load_where, warp_number

HALF = tl.constexpr(144)
"""Shared-memory bytes of the upper or lower bytes of x per block, padded: threads read both halves
of four blocks at a time, which must be in different banks."""
TABLE = tl.constexpr(32)
"""Bytes of the table of a block of x: the sums of its four planes, and their units."""
SUMS = tl.constexpr(64)
"""Bytes of the sums per step: 16 float32."""
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


def _row_matmul_torch(
    x: Tensor | AttentionParts, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows = x.average()[None] if isinstance(x, AttentionParts) else x
    return prepacked_torch(rows, pieces, out_features, in_features, gated, eps, added, dtype)


def _row_matmul_native(
    x: Tensor | AttentionParts, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows = x.average()[None] if isinstance(x, AttentionParts) else x
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
    x, bits = unpair(a) + unpair(b), ()
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
def _over_four(values, PTX: tl.constexpr):
    """Sum each int32 of a tuple over four neighbouring threads."""
    for turn in tl.static_range(2):
        others, sums = (), ()
        for t in tl.static_range(len(values)):
            others = others + (across(values[t], 1 << turn, PTX),)  # noqa: RUF005
        for t in tl.static_range(len(values)):
            sums = sums + (values[t] + others[t],)  # noqa: RUF005
        values = sums
    return values


@triton.jit
def _largest_of_four(values, PTX: tl.constexpr):
    """Compute the maximum of each pair of a tuple over four neighbouring threads."""
    for turn in tl.static_range(2):
        others, most = (), ()
        for t in tl.static_range(len(values)):
            others = others + (across(values[t], 1 << turn, PTX),)  # noqa: RUF005
        for t in tl.static_range(len(values)):
            most = most + (_max_pairs(values[t], others[t], PTX),)  # noqa: RUF005
        values = most
    return values


@triton.jit
def round_x(octets, units, x_at, tables_at, PTX: tl.constexpr):
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
    for t in tl.static_range(TURNS):
        largest = largest + (_largest(octets[t], PTX),)  # noqa: RUF005
    largest = _largest_of_four(largest, PTX)
    for t in tl.static_range(TURNS):
        u, four = units[t], octets[t]
        most = tl.maximum(largest[t] & 0xFFFF, (largest[t] >> 16) & 0xFFFF)
        exponent = tl.maximum(most >> 7, _LEAST)
        inverse = ((267 - exponent) << 23).to(tl.float32, bitcast=True)  # 2**14 / 2**(e + 1)
        exponents = exponents + (tl.where(most >= _NOT_FINITE, -1, exponent),)  # noqa: RUF005
        low_0, high_0 = _round_four(four[0], four[1], inverse, PTX)
        low_1, high_1 = _round_four(four[2], four[3], inverse, PTX)
        upper = _sum_bytes(high_1, _sum_bytes(high_0, zero, PTX), PTX)
        total = _sum_bytes(low_1, _sum_bytes(low_0, upper << 8, PTX), PTX)
        totals = totals + (total,)  # noqa: RUF005
        at = x_at[t] + (2 * HALF * (u // 16) + 32 * (u % 4) + 8 * (u // 4 % 4))
        write_two(at, high_0, high_1, PTX)
        write_two(at + HALF, low_0, low_1, PTX)
    totals = _over_four(totals, PTX)
    for t in tl.static_range(TURNS):
        u = units[t]
        plane = u // 4 % 4
        unit = tl.where(exponents[t] < 0, 0x7FC00000, (exponents[t] - 13 - 2 * plane) << 23)
        to, first = tables_at[t] + (TABLE * (u // 16) + 4 * plane), u % 4 == 0
        write_where(to, totals[t] << (2 * plane), first, PTX)
        write_where(to + 16, unit, first, PTX)


@triton.jit
def _average_parts(values_ptr, totals_ptr, parts, u, K, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Average the u-th eight elements of the parts of attention (see `AttentionParts`)."""
    total = tl.zeros(u.shape, tl.float32)
    sums = (total,) * 8
    for start in range(0, parts, _PARTS_AT_ONCE):
        octets, shares = (), ()
        for i in tl.static_range(_PARTS_AT_ONCE):  # issue all loads before the first use
            part = tl.minimum(start + i, parts - 1)
            of_heads = totals_ptr + (part * (K // WIDTH) + 8 * u // WIDTH)
            octets = octets + (load_new(values_ptr + (part * (K // 4) + 2 * u), PTX),)  # noqa: RUF005
            shares = shares + (tl.load(of_heads, cache_modifier=".cg"),)  # noqa: RUF005
        for i in tl.static_range(_PARTS_AT_ONCE):
            share = tl.where(start + i < parts, shares[i], 0.0)
            total += share
            x, added = unpair_four(octets[i]), ()
            for j in tl.static_range(8):
                added = added + (sums[j] + x[j] * share,)  # noqa: RUF005
            sums = added
    inverse, four = 1.0 / total, ()
    for i in tl.static_range(4):
        pair = round_pair(sums[2 * i] * inverse, sums[2 * i + 1] * inverse, PTX)
        four = four + (pair,)  # noqa: RUF005
    return four


@triton.jit
def _load_x(
    x_ptr, totals_ptr, parts, u, K, WIDTH: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr
):
    """Load the u-th eight elements of x, as four int32; zeros beyond K."""
    if WIDTH > 0:
        octet = _average_parts(x_ptr, totals_ptr, parts, tl.minimum(u, K // 8 - 1), K, WIDTH, PTX)
        four = ()
        for i in tl.static_range(4):
            four = four + (octet[i] if WHOLE else tl.where(8 * u < K, octet[i], 0),)  # noqa: RUF005
    elif WHOLE:
        four = load_new(x_ptr + 2 * u, PTX)
    else:
        four = load_where(x_ptr + 2 * u, 8 * u < K, False, PTX)
    return four


@triton.jit
def sum_of_squares(four):
    """Sum the squares of eight elements, given as four int32."""
    x = unpair_four(four)
    even, odd = x[0] * x[0], x[1] * x[1]
    for i in tl.static_range(2, 8, 2):
        even += x[i] * x[i]
        odd += x[i + 1] * x[i + 1]
    return even + odd


@triton.jit
def _take_x(
    x_ptr, totals_ptr, parts, first, K, x_at, tables_at, thread,
    TURNS: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Load and round groups of eight of x from `first` on, and return their squares."""
    THREADS: tl.constexpr = thread.shape[0]
    octets, units, squares = (), (), tl.zeros(thread.shape, tl.float32)
    for t in tl.static_range(TURNS):
        u = thread + (first + THREADS * t)
        if not PTX:  # warps without work of their own repeat that of others
            u = u % UNITS
        octets = octets + (_load_x(x_ptr, totals_ptr, parts, u, K, WIDTH, WHOLE, PTX),)  # noqa: RUF005
        units = units + (u,)  # noqa: RUF005
    round_x(octets, units, (x_at,) * TURNS, (tables_at,) * TURNS, PTX)
    for t in tl.static_range(TURNS):
        of_octet = sum_of_squares(octets[t])
        if not PTX:
            of_octet = tl.where(thread + (first + THREADS * t) < UNITS, of_octet, 0.0)
        squares += of_octet
    return squares


@triton.constexpr_function
def mask_of(plane):
    """Return the mask of a plane's codes in a word."""
    return (0x03030303, 0x0C0C0C0C, 0x30303030, -0x3F3F3F40)[plane]


@triton.jit
def _multiply_step(
    codes, scales, x_at, tables_at, block, thread, ABREAST: tl.constexpr, PTX: tl.constexpr
):
    """Multiply 16 rows by a warp's part of x; return the sums of rows r and r + 8.

    Thread 4 r + c has bytes of its own block, block + c, of four abreast: a column of the
    instruction is of one of them, and x is 0 there for the threads of others. With one block, a
    thread has its j = c.
    """
    r, c = thread // 4 % 8, thread % 4
    nothing = tl.zeros_like(thread)
    own = r // 2 == c if ABREAST == 4 else r < 2
    mine = block + (c if ABREAST == 4 else 0)
    of_x = x_at + (2 * HALF * mine + HALF * (r % 2) + (32 * c if ABREAST == 1 else 0))
    sums = ((nothing,) * 4,) * 4
    for j in tl.static_range(ABREAST):
        w = codes[j]
        x = read_four_where(of_x + 32 * j, own, (nothing,) * 4, PTX)
        x = x + read_four_where(of_x + (32 * j + 16), own, (nothing,) * 4, PTX)
        added = ()
        for i in tl.static_range(4):
            mask = mask_of(i)
            masked = (w[0] & mask, w[1] & mask, w[2] & mask, w[3] & mask)
            of_plane = add_byte_products(sums[i], masked, (x[2 * i], x[2 * i + 1]), PTX)
            added = added + (of_plane,)  # noqa: RUF005
        sums = added
    totals = read_four(tables_at + TABLE * mine, PTX)
    units = read_four(tables_at + (TABLE * mine + 16), PTX)
    upper, lower = tl.zeros(thread.shape, tl.float32), tl.zeros(thread.shape, tl.float32)
    for i in tl.static_range(4):
        four, unit = sums[i], units[i].to(tl.float32, bitcast=True)
        of_upper = (four[0] << 8) + (four[1] - totals[i])
        of_lower = (four[2] << 8) + (four[3] - totals[i])
        upper += of_upper.to(tl.float32) * (unpair(scales[i // 2])[i % 2] * unit)
        lower += of_lower.to(tl.float32) * (unpair(scales[2 + i // 2])[i % 2] * unit)
    if ABREAST == 4:
        for turn in tl.static_range(2):
            of_others = across(upper, 1 << turn, PTX), across(lower, 1 << turn, PTX)
            upper, lower = upper + of_others[0], lower + of_others[1]
    return upper, lower


@triton.jit
def _do_step(
    codes, scales, step, sums_at, x_at, tables_at, thread,
    PER_TILE: tl.constexpr, ABREAST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute a warp's step, and write its sums."""
    block = step % PER_TILE * ABREAST
    upper, lower = _multiply_step(codes, scales, x_at, tables_at, block, thread, ABREAST, PTX)
    at = sums_at + (SUMS * step + 4 * (thread // 4 % 8))
    write_where(at, upper, thread % 4 == 0, PTX)
    write_where(at + 32, lower, thread % 4 == 0, PTX)


@triton.constexpr_function
def width_of(blocks, abreast):
    """Compute the number of blocks of x in shared memory, rounded up to whole steps and warps."""
    steps = -(-blocks // abreast)
    return (steps * abreast + 1) // 2 * 2


@triton.jit
def finish(
    sums_at, squares_at, share, eps, added,
    NORM: tl.constexpr, GATED: tl.constexpr, PER_TILE: tl.constexpr, SQUARES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Sum the steps of a row, normalise, gate, and add `added`.

    Address `squares_at` has `SQUARES` sums of squares.
    """
    y, odd = tl.zeros(added.shape, tl.float32), tl.zeros(added.shape, tl.float32)
    for k in tl.static_range(0, PER_TILE, 2):
        y += read_float(sums_at + SUMS * k, PTX)
        if k + 1 < PER_TILE:
            odd += read_float(sums_at + SUMS * (k + 1), PTX)
    y += odd
    if NORM:
        total = tl.zeros(added.shape, tl.float32)
        for first in tl.static_range(0, SQUARES, 4):
            four = read_four(squares_at + 4 * first, PTX)
            for i in tl.static_range(min(4, SQUARES - first)):
                total += four[i].to(tl.float32, bitcast=True)
        y *= tl.rsqrt(total * share + eps)
    if GATED:
        y = y / (1 + tl.exp(-y)) * across(y, 8, PTX)
    return y + added


@triton.jit(do_not_specialize=["N", "K", "tiles", "most", "span"])
@no_type_check
def _row_matmul_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr, instead_ptr, totals_ptr, position_ptr,
    N, K, tiles, share, eps, most, span,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    ABREAST: tl.constexpr, HEIGHT: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, BYTES: tl.constexpr,
    PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    THREADS: tl.constexpr = 32 * WARPS
    thread = tl.arange(0, THREADS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    zero = tl.zeros(thread.shape, tl.float32)
    PER_TILE: tl.constexpr = (BLOCKS + ABREAST - 1) // ABREAST
    STEPS: tl.constexpr = HEIGHT * PER_TILE
    WIDE: tl.constexpr = width_of(BLOCKS, ABREAST)
    first_tile = tl.program_id(0) * HEIGHT

    # all weights of a warp; the padding of its last steps repeats others, times x of 0
    codes, scales = (), ()
    for turn in tl.static_range(0, STEPS, WARPS):
        step = tl.minimum(warp + turn, STEPS - 1)
        tile = tl.minimum(first_tile + step // PER_TILE, tiles - 1)
        block = step % PER_TILE * ABREAST + (c if ABREAST == 4 else 0)
        block = tl.minimum(block, BLOCKS - 1)
        piece = pieces_ptr + ((tile * BLOCKS + block).to(tl.int64) * (PIECE_BYTES // 8) + 2 * r)
        of_step = ()
        for j in tl.static_range(ABREAST):
            unit = piece + 16 * (j if ABREAST == 4 else c)
            of_step = of_step + (load_constant(unit, PTX),)  # noqa: RUF005
        codes = codes + (of_step,)  # noqa: RUF005
        scales = scales + (load_constant(piece + 64, PTX),)  # noqa: RUF005

    x_at = memory_of(instead_ptr, thread, BYTES, PTX)
    tables_at = x_at + 2 * HALF * WIDE
    sums_at = tables_at + TABLE * WIDE
    squares_at = sums_at + SUMS * STEPS
    of_tile, row = thread // 16, thread % 16  # index of the result that a thread stores
    n = (first_tile + of_tile) * (8 if GATED else 16) + (row % 8 if GATED else row)
    stores = (of_tile < HEIGHT) & (n < N) & (row < (8 if GATED else 16))
    parts = 1
    if WIDTH > 0:
        parts = tl.minimum(tl.cdiv(tl.load(position_ptr) + 1, span), most)
    wait_for_last(OVERLAP, EARLY)
    added = zero
    if ADD:
        added = tl.load(added_ptr + n, mask=stores, other=0, cache_modifier=".cg").to(tl.float32)

    UNITS: tl.constexpr = 16 * WIDE
    TURNS: tl.constexpr = UNITS // THREADS
    squares = zero
    if TURNS > 0:
        squares += _take_x(
            x_ptr, totals_ptr, parts, 0, K, x_at, tables_at, thread, TURNS, UNITS, WIDTH, WHOLE, PTX
        )
    if TURNS * THREADS < UNITS:
        some = warp_number() * 32 + TURNS * THREADS < UNITS if PTX else True
        if some:
            squares += _take_x(
                x_ptr, totals_ptr, parts, TURNS * THREADS, K, x_at, tables_at, thread,
                1, UNITS, WIDTH, WHOLE, PTX,
            )  # fmt: skip
    if NORM:
        for turn in tl.static_range(5):
            squares += across(squares, 1 << turn, PTX)
        write(squares_at + 4 * warp, squares, PTX)
    tl.debug_barrier()
    for turn in tl.static_range(0, STEPS, WARPS):
        some = True
        if turn + WARPS > STEPS:
            some = warp_number() + turn < STEPS if PTX else True
        if some:
            _do_step(
                codes[turn // WARPS], scales[turn // WARPS], tl.minimum(warp + turn, STEPS - 1),
                sums_at, x_at, tables_at, thread, PER_TILE, ABREAST, PTX,
            )  # fmt: skip
    tl.debug_barrier()
    some = warp_number() * 2 < HEIGHT if PTX else True
    if some:
        at = sums_at + (SUMS * PER_TILE * tl.minimum(of_tile, HEIGHT - 1) + 4 * row)
        y = finish(at, squares_at, share, eps, added, NORM, GATED, PER_TILE, WARPS, PTX)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=stores)


class Tiling(NamedTuple):
    """Partition of a product among programs and warps."""

    abreast: int
    """Blocks per step, 1 or 4."""
    height: int
    """Tiles per program."""
    warps: int
    """Number of warps per program, a multiple of 4; each takes every `warps`-th step."""
    registers: int = 128
    """Maximum number of registers per thread; fewer let the next kernel start earlier."""

    def shared_bytes(self, blocks: int) -> int:
        """Compute the bytes of shared memory per program, for x, the sums of steps, and squares."""
        steps = self.height * -(-blocks // self.abreast)
        width = width_of(blocks, self.abreast)
        of_x = (2 * HALF.value + TABLE.value) * width
        return of_x + SUMS.value * steps + 4 * self.warps


def tiling_of(tiles: int, blocks: int, processors: int) -> Tiling:
    """Choose the tiling that was fastest on an H200 for `1b`, or a similar one otherwise."""
    each = -(-tiles // processors)
    if each == 1 and blocks <= 16:  # one warp per block
        return Tiling(1, 1, max(4, triton.next_power_of_2(blocks)), 64)
    steps = -(-blocks // 4)
    most = 8 if steps <= 16 else 16
    height = max(1, min(each, 4, 2 * most // steps))  # at most two steps per warp
    warps = max(4, min(most, triton.next_power_of_2(height * steps)))
    return Tiling(4, height, warps, 96 if height == 4 else 128)


MOST_COLUMNS = 17_920
"""Largest K: more columns of x do not fit in shared memory."""


def _row_matmul_triton(
    x: Tensor | AttentionParts, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype | None, early: bool = False,
) -> Tensor:  # fmt: skip
    y = torch.empty(1, out_features, dtype=dtype, device=pieces.device)
    tiles, blocks = pieces.shape[:2]
    to = y if added is None else added.contiguous()
    totals, position, most, span, width = to, to, 1, 1, 0
    if isinstance(x, AttentionParts):
        most, heads = x.totals.shape
        totals, position, span, width = x.totals, x.position, x.span, in_features // heads
        x = x.values
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    tiling = tiling_of(tiles, blocks, num_processors(x))
    abreast, height, warps, registers = tiling
    size, grid = tiling.shared_bytes(blocks), triton.cdiv(tiles, height)
    instead = pieces if HAS_PTX else pieces.new_empty(grid * size)
    _row_matmul_kernel[(grid,)](
        x.flatten().view(torch.int64), pieces.view(torch.int64), to, y, instead, totals, position,
        out_features, in_features, tiles, 1 / in_features, 0.0 if eps is None else eps,
        most, span,
        NORM=eps is not None, GATED=gated, ADD=added is not None,
        ABREAST=abreast, HEIGHT=height, BLOCKS=blocks, WARPS=warps,
        WIDTH=width, WHOLE=in_features == BLOCK * width_of(blocks, abreast), EARLY=early,
        BYTES=size, PTX=HAS_PTX, num_warps=warps, maxnreg=registers, **overlap_options(x),
    )  # fmt: skip
    return y


def row_matmul(
    x: Tensor | AttentionParts,
    weight: Prepacked,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
    early: bool = False,
) -> Tensor:
    """Normalise a row, multiply by a prepacked matrix, gate the product and add `added`.

    Args:
        x: (1, K) bfloat16, contiguous, K a multiple of 8 and at most `MOST_COLUMNS`; or
            `AttentionParts`, which are averaged to x. On a CPU float32 too.
        weight: the prepacked matrix.
        eps: added to the mean square; None omits the norm.
        added: like the result; None omits the sum.
        dtype: dtype of the result, bfloat16 or float32; the default is that of `x`.
        early: whether the next kernel may start before the previous one has ended: see `overlap`.

    Returns:
        (1, N) in `dtype`, from x rounded to 15 bits per group of 32 elements; accumulated in
        float32 and rounded once. NaN if an element of x is not finite.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    row = x.values[:1] if isinstance(x, AttentionParts) else x
    inputs = *weight, eps, added, dtype or row.dtype
    ROW_MATMUL.check(row, *inputs)
    if isinstance(x, AttentionParts):
        x.check()
    if uses_triton(row):
        return _row_matmul_triton(x, *inputs, early)
    return ROW_MATMUL.chosen(row)(x, *inputs)


ROW_MATMUL = Operation(
    "row_matmul", _row_matmul_triton, _row_matmul_torch, PREPACKED_ARGUMENTS,
    native=_row_matmul_native, where=(*few_rows_fit(1), f"in_features <= {MOST_COLUMNS}"),
)  # fmt: skip

"""Product y = x @ w.T for few rows of bf16 x, bound by the bandwidth of reading w.

A warp multiplies 16 or 32 rows of w by all rows of x, over part of the columns, with the
instruction of `warp_products`. Trits are decoded in registers and never written to shared memory.

Thread c of a row decodes bytes 8 c .. 8 c + 7 of a block. The digits of these are in five planes of
32 weights, each within one group, so that one scale multiplies 32 products at once. A thread builds
the scales of one block of four, the c-th, and the others fetch them from it.

One or two rows of x leave columns of the instruction unused. Then each of four threads decodes a
whole block, four blocks *abreast*: their products are in different columns of y, because x is 0 in
the columns of other blocks. This needs a quarter of the scalings and no exchange of scales.

    column of the instruction      0     1     2     3     4     5     6     7
    rows of x, eight of them       0     1     2     3     4     5     6     7     of one block
    two of them, abreast           0     1     0     1     0     1     0     1     of four:
                                  block 0     block 1     block 2     block 3

Reason: below about 64 rows, loading w, 1.6 bits per weight, takes the most time, and decoding must
not take longer. So digits are decoded in the operand registers of the instruction; through shared
memory, bf16 weights would be written and read, ten times the bytes.

With more than eight rows, x is first copied such that each load of a warp is contiguous.
"""

from typing import no_type_check

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import BLOCK, PLANE
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.scales import scale_of
from arbcli.kernels.codec.warp_products import (
    HAS_PTX,
    add_products,
    add_scaled,
    from_lane,
    multiply_pairs,
    pair,
    shift_pair,
    spread,
    take_digits,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import num_processors

FEW_ROWS = 64
"""Largest M for which this kernel is faster than decoding the weights once."""
_PROCESSORS = 132
"""Number of multiprocessors to assume without a GPU: that of an H200."""
_SIZES = ("M", "N", "K", *(f"stride_{n}" for n in ("xm", "pn", "en", "fn", "ym")))
"""Arguments that Triton does not specialise on."""

_LOAD_EIGHT = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_EIGHT_OVER = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $5, 0;
@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")


@triton.constexpr_function
def _load_ptx(kind, zero):
    start = "mov.b32 $0, 0;" if zero else ""
    return f"{{\n.reg .pred p;\nsetp.ne.b32 p, $2, 0;\n{start}\n@p ld.global.{kind} $0, [$1];\n}}"


@triton.constexpr_function
def _scale_ptx(i, negative):
    half, sign = ("0x80008000" if negative else "0x8000"), f"{8 + i:x}"
    return f"""{{
.reg .b32 e;
prmt.b32 $0, $2, 0, 0x4{i}44;
add.u32 $0, $0, 0x3F800000;  // 1 + F / 128
ex2.approx.ftz.f32 $0, $0;
add.u32 $0, $0, {half};
and.b32 $0, $0, 0xFFFF0000;  // rounded to bf16
prmt.b32 e, $1, 0, 0x{3 * sign}{i};
mad.lo.u32 $0, e, 0x800000, $0;
}}"""


@triton.jit
def load_int(pointer, mask, KIND: tl.constexpr, ZERO: tl.constexpr, PTX: tl.constexpr):
    """Load a `b32`, `s8` or `u8` as int32 where `mask`; elsewhere 0 with `ZERO`, else undefined.

    Uses PTX, because Triton's analysis of plain loads makes this kernel compile for a minute.
    """
    if PTX:
        CODE: tl.constexpr = _load_ptx(KIND, ZERO)
        value = tl.inline_asm_elementwise(
            CODE, "=&r,l,r", [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        TYPE: tl.constexpr = tl.int32 if KIND == "b32" else tl.int8 if KIND == "s8" else tl.uint8
        value = tl.load(pointer.to(tl.pointer_type(TYPE)), mask=mask, other=0).to(tl.int32)
    return value


@triton.jit
def _load_eight(pointer, PTX: tl.constexpr):
    """Load eight elements of x as four int32."""
    if PTX:
        x = tl.inline_asm_elementwise(
            _LOAD_EIGHT, "=r,=r,=r,=r,l", [pointer.to(tl.int64)],
            dtype=(tl.int32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = pointer.to(tl.pointer_type(tl.int32))
        x = (tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3))
    return x


@triton.jit
def load_eight_over(old, pointer, mask, PTX: tl.constexpr, WRITTEN: tl.constexpr = False):
    """Load eight elements of x, 16 bytes, where `mask`; elsewhere keep `old`, which is 0.

    With `WRITTEN` the load is not moved before the wait for the kernel that writes x.
    """
    if PTX:
        x = tl.inline_asm_elementwise(
            _LOAD_EIGHT_OVER, "=r,=r,=r,=r,l,r,0,1,2,3",
            [pointer.to(tl.int64), mask.to(tl.int32), old[0], old[1], old[2], old[3]],
            dtype=(tl.int32,) * 4, is_pure=not WRITTEN, pack=1,
        )  # fmt: skip
    else:
        x = ()
        for i in tl.static_range(4):
            word = tl.load(pointer.to(tl.pointer_type(tl.int32)) + i, mask=mask, other=0)
            x = x + (word,)  # noqa: RUF005
    return x


@triton.jit
def _scale(exponent, fraction, i: tl.constexpr, digit: tl.constexpr, PTX: tl.constexpr):
    """Build 2 * scale, negated for an even digit, from the i-th bytes of two words."""
    if PTX:
        CODE: tl.constexpr = _scale_ptx(i, digit % 2 == 0)
        scale = tl.inline_asm_elementwise(
            CODE, "=&f,r,r", [exponent, fraction], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        LEFT: tl.constexpr = 24 - 8 * i
        scale = scale_of((exponent << LEFT) >> 24, (fraction << LEFT) >> 24)
        scale *= -2 if digit % 2 == 0 else 2
    return scale


@triton.jit
def _scale_trits(trits, scale, PTX: tl.constexpr):
    both, scaled = pair(scale, scale), ()
    for i in tl.static_range(len(trits)):
        scaled = scaled + (multiply_pairs(trits[i], both, PTX),)  # noqa: RUF005
    return scaled


@triton.jit
def _add_tiles(sums, trits, scales, x, PTX: tl.constexpr):
    """Add the products of rows of w and one tile of x, times `scales` if trits are not scaled."""
    added = ()
    for i in tl.static_range(len(sums)):
        if len(scales) == 0:
            tile = add_products(sums[i], trits[8 * i : 8 * i + 8], x, PTX)
        else:
            products = add_products((0.0, 0.0, 0.0, 0.0), trits[8 * i : 8 * i + 8], x, PTX)
            tile = add_scaled(sums[i], products, scales[2 * i], scales[2 * i + 1])
        added = added + (tile,)  # noqa: RUF005
    return added


@triton.jit
def _advance(pointers, by):
    moved = ()
    for i in tl.static_range(len(pointers)):
        moved = moved + (pointers[i] + by,)  # noqa: RUF005
    return moved


@triton.jit
def _load_words(
    pointers, skews, OFFSET: tl.constexpr, COUNT: tl.constexpr, mask, ZERO: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Load `COUNT` words of each row; the last one is needed if a row is not word-aligned."""
    loaded = ()
    for i in tl.static_range(len(pointers)):
        words = ()
        for j in tl.static_range(COUNT):
            here = mask & (skews[i] > 0) if j == COUNT - 1 else mask
            word = load_int(pointers[i] + (OFFSET + 4 * j), here, "b32", ZERO, PTX)
            words = words + (word,)  # noqa: RUF005
        loaded = loaded + (words,)  # noqa: RUF005
    return loaded


@triton.jit
def _begin(words, first: tl.constexpr, skews, PTX: tl.constexpr):
    """Start decoding eight bytes of each row, after shifting, as rows are not aligned."""
    qs = ()
    for i in tl.static_range(len(words)):
        for j in tl.static_range(first, first + 2):
            qs = qs + spread(shift_pair(words[i][j], words[i][j + 1], skews[i], PTX), PTX)
    return qs


@triton.jit
def _load_digits(
    rows, strides, block, c, mask, groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Load E, and F if present, of the five scales of a block, for each row.

    With `WORDS`, the block is the c-th from `block` on: its digits are bytes 5 c .. 5 c + 4 of the
    four blocks' 20, and therefore lie in words c and c + 1.
    """
    loaded = ()
    for i in tl.static_range(len(rows)):
        if WORDS:
            word = rows[i] + (5 * block + 4 * c)
            for j in tl.static_range(2):
                digits = load_int(word + 4 * j, mask, "b32", False, PTX)
                loaded = loaded + (digits,)  # noqa: RUF005
        else:
            for j in tl.static_range(5):
                group = (5 * block + j) // (GROUP // 32)
                pointer = rows[i] + group * strides[i // ROWS]
                digits = load_int(pointer, mask & (group < groups), "s8", True, PTX)
                loaded = loaded + (digits,)  # noqa: RUF005
    return loaded


@triton.jit
def _scales(digits, c, ROWS: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr):
    """Build the five scales of a block for each row."""
    COUNT: tl.constexpr = 2 if WORDS else 5
    scales = ()
    for i in tl.static_range(ROWS):
        exponents = digits[COUNT * i : COUNT * i + COUNT]
        fractions = (tl.zeros_like(c),) * COUNT
        if len(digits) > COUNT * ROWS:
            fractions = digits[COUNT * (ROWS + i) : COUNT * (ROWS + i) + COUNT]
        for digit in tl.static_range(5):
            if not WORDS:
                e, f = exponents[digit], fractions[digit]
            elif digit < 4:
                e = shift_pair(exponents[0], exponents[1], 8 * c, PTX)
                f = shift_pair(fractions[0], fractions[1], 8 * c, PTX)
            else:
                e, f = exponents[1] >> (8 * c), fractions[1] >> (8 * c)
            scale = _scale(e, f, digit if WORDS and digit < 4 else 0, digit, PTX)
            scales = scales + (scale,)  # noqa: RUF005
    return scales


@triton.jit
def _add_block(
    sums, qs, xs, BLOCK: tl.constexpr, mask, scales, LANE: tl.constexpr, c,
    TILES: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of the block `BLOCK` blocks after `xs`; thread `LANE` has its scales."""
    ROWS: tl.constexpr = len(qs) // 4
    HEIGHT: tl.constexpr = ROWS // 2
    zero, lane = tl.zeros_like(c), tl.full(c.shape, LANE, tl.int32)
    for digit in tl.static_range(4, -1, -1):
        trits, qs = take_digits(qs, digit, PTX)
        of_rows, scaled = (), ()
        for i in tl.static_range(ROWS):
            scale = from_lane(scales[5 * i + digit], lane, PTX)
            if TILES > 1:
                scaled = scaled + _scale_trits(trits[4 * i : 4 * i + 4], scale, PTX)
            else:
                of_rows = of_rows + (scale,)  # noqa: RUF005
        if TILES > 1:
            trits = scaled
        added = ()
        for tile in tl.static_range(TILES):
            # in bytes: a plane has 512 a tile if x is tiled, else 64 in a row of x
            offset = 512 * ((5 * BLOCK + digit) * TILES + tile)
            if TILES == 1:
                offset = 64 * (5 * BLOCK + digit)
            if MASKED:
                x = load_eight_over((zero, zero, zero, zero), xs + offset, mask, PTX)
            else:
                x = _load_eight(xs + offset, PTX)
            of_tile = sums[HEIGHT * tile : HEIGHT * tile + HEIGHT]
            added = added + _add_tiles(of_tile, trits, of_rows, x, PTX)
        sums = added
    return sums


@triton.jit
def _add_four_blocks(sums, words, skews, xs, x, own, scales, PTX: tl.constexpr):
    """Add the products of four blocks abreast; the registers `x` are 0 except where `own`."""
    zero = tl.zeros_like(sums[0])
    products = ((zero, zero, zero, zero),) * 5
    for j in tl.static_range(4):
        qs = _begin(words, 2 * j, skews, PTX)
        added = ()
        for digit in tl.static_range(4, -1, -1):
            trits, qs = take_digits(qs, digit, PTX)
            eight = load_eight_over(x[0], xs + (64 * digit + 16 * j), own, PTX)
            x = x[1:] + (eight,)  # noqa: RUF005
            added = (add_products(products[digit], trits, eight, PTX),) + added  # noqa: RUF005
        products = added
    for digit in tl.static_range(5):
        sums = add_scaled(sums, products[digit], scales[digit], scales[5 + digit])
    return sums, x


@triton.jit
def _rest_digits(rows, width, k, rest, PTX: tl.constexpr):
    """Decode the digit of weight k of the last block for each row: 0..2 in bits 16 and 17."""
    byte, factor = k, tl.full(k.shape, 21846, tl.int32)  # 2**16 / 3 ** (digit + 1)
    for digit in tl.static_range(1, 5):
        later = k >= digit * width
        byte = tl.where(later, k - digit * width, byte)
        factor = tl.where(later, 2**16 // 3 ** (digit + 1) + 1, factor)
    found = ()
    for i in tl.static_range(len(rows)):
        value = load_int(rows[i] + byte, k < rest, "u8", True, PTX)
        found = found + (((value * factor) & 0xFFFF) * 3,)  # noqa: RUF005
    return found


@triton.jit
def _add_rest(
    sums, starts, digit_rows, strides, x_rows, K, blocks, warp, c, live,
    WARPS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of the last block, whose planes are narrower, 32 weights at a time."""
    ROWS: tl.constexpr = len(starts)
    HEIGHT: tl.constexpr = ROWS // 2
    rows = _advance(starts, 32 * blocks)
    first = 160 * blocks
    rest = K - first
    width = (rest + 4) // 5
    for turn in range(tl.cdiv(rest, 32 * WARPS)):
        begin = 32 * (turn * WARPS + warp)
        pairs = ()
        for i in tl.static_range(4):
            k = begin + 8 * c + 2 * i
            low = _rest_digits(rows, width, k, rest, PTX)
            high = _rest_digits(rows, width, k + 1, rest, PTX)
            for j in tl.static_range(ROWS):
                both = ((low[j] >> 2) & 0xC000) | ((high[j] << 14) & -0x40000000)
                pairs = pairs + ((both ^ 0x40004000) & -0x3FFF4000,)  # noqa: RUF005
        group = (first + begin) // GROUP
        trits, scales = (), ()
        for i in tl.static_range(ROWS):
            some = begin < rest
            exponent = load_int(digit_rows[i] + group * strides[0], some, "s8", True, PTX)
            fraction = tl.zeros_like(exponent)
            if len(digit_rows) > ROWS:
                fraction = load_int(
                    digit_rows[ROWS + i] + group * strides[1], some, "s8", True, PTX
                )
            scale = _scale(exponent, fraction, 0, 0, PTX)
            of_row = (pairs[i], pairs[ROWS + i], pairs[2 * ROWS + i], pairs[3 * ROWS + i])
            if TILES > 1:
                trits = trits + _scale_trits(of_row, scale, PTX)
            else:
                trits = trits + of_row
                scales = scales + (scale,)  # noqa: RUF005
        k = begin + 8 * c
        zero = tl.zeros_like(c)
        added = ()
        for tile in tl.static_range(TILES):
            pointer = x_rows[tile] + 2 * (first + begin)
            loaded = load_eight_over((zero, zero, zero, zero), pointer, (k < rest) & live, PTX)
            x = ()
            for i in tl.static_range(4):
                left = rest - k - 2 * i
                keep = tl.where(left > 1, -1, tl.where(left > 0, 0xFFFF, 0))
                x = x + (loaded[i] & keep,)  # noqa: RUF005
            of_tile = sums[HEIGHT * tile : HEIGHT * tile + HEIGHT]
            added = added + _add_tiles(of_tile, trits, scales, x, PTX)
        sums = added
    return sums


@triton.jit(do_not_specialize=_SIZES)
@no_type_check
def _few_rows_kernel(
    x_ptr, tiled_ptr, packed_ptr, exponent_ptr, fraction_ptr, y_ptr,
    M, N, K,
    stride_xm, stride_pn, stride_en, stride_eg, stride_fn, stride_fg, stride_ym, stride_yn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, WORDS: tl.constexpr,
    N_WARPS: tl.constexpr, K_WARPS: tl.constexpr, HEIGHT: tl.constexpr, TILES: tl.constexpr,
    ABREAST: tl.constexpr, AHEAD: tl.constexpr, LEFT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * N_WARPS * K_WARPS)
    r, c = thread // 4 % 8, thread % 4
    warp_n, warp = thread // 32 % N_WARPS, thread // (32 * N_WARPS)
    first_n = tl.program_id(0) * (16 * HEIGHT * N_WARPS)
    ROWS: tl.constexpr = 2 * HEIGHT
    STEP: tl.constexpr = 4 * K_WARPS  # blocks per round: four per warp
    blocks, groups = K // 160, tl.cdiv(K, GROUP)
    rounds = blocks // STEP
    strides = (stride_eg, stride_fg)
    starts, skews, words_at, digit_rows, fraction_rows = (), (), (), (), ()
    for i in tl.static_range(ROWS):
        n = tl.minimum(first_n + 16 * HEIGHT * warp_n + 8 * i + r, N - 1).to(tl.int64)
        start = packed_ptr + n * stride_pn
        skew = (start.to(tl.int64) & 3).to(tl.int32)
        starts = starts + (start,)  # noqa: RUF005
        skews = skews + (8 * skew,)  # noqa: RUF005
        words_at = words_at + (start - skew,)  # noqa: RUF005
        exponents = (exponent_ptr + n * stride_en).to(tl.pointer_type(tl.uint8))
        fractions = (fraction_ptr + n * stride_fn).to(tl.pointer_type(tl.uint8))
        digit_rows = digit_rows + (exponents,)  # noqa: RUF005
        fraction_rows = fraction_rows + (fractions,)  # noqa: RUF005
    if HAS_FRACTION:
        digit_rows = digit_rows + fraction_rows
    zero = tl.zeros(thread.shape, tl.float32)
    sums = ((zero, zero, zero, zero),) * (HEIGHT * TILES)
    x_rows = ()
    for tile in tl.static_range(TILES):
        m = tl.minimum(8 * tile + r, M - 1).to(tl.int64)
        x_row = (x_ptr + (m * stride_xm + 8 * c)).to(tl.pointer_type(tl.uint8))
        x_rows = x_rows + (x_row,)  # noqa: RUF005
    live = r < (8 if ABREAST == 1 else 2)  # the other columns of y are unused
    if TILES > 1:
        x_lanes = tiled_ptr.to(tl.pointer_type(tl.uint8)) + 16 * (thread % 32)
        X_BLOCK: tl.constexpr = 2560 * TILES
    else:
        x_lanes = x_rows[0]
        X_BLOCK: tl.constexpr = 320  # type: ignore[no-redef]

    # prefetch the blocks beyond whole rounds, and those of the first round
    left = rounds * STEP + warp
    left_words = ()
    for i in tl.static_range(LEFT):
        at = _advance(words_at, 32 * left + 8 * c)
        some = left + i * K_WARPS < blocks
        block_words = _load_words(at, skews, 32 * K_WARPS * i, 3, some, True, PTX)
        left_words = left_words + (block_words,)  # noqa: RUF005
    if LEFT > 0:
        mine = left + c * K_WARPS
        some = (mine < blocks) & (c < LEFT)
        left_digits = _load_digits(
            digit_rows, strides, mine, c, some, groups, ROWS, GROUP, False, PTX
        )
    block = 4 * warp
    some = tl.zeros_like(c) < rounds
    if ABREAST == 4:
        words_at = _advance(words_at, 32 * (block + c))
        words = _load_words(words_at, skews, 0, 9, some, False, PTX)
        own = r // 2 == c
        m = tl.minimum(r % 2, M - 1).to(tl.int64)
        xs = (x_ptr + m * stride_xm).to(tl.pointer_type(tl.uint8)) + 320 * (block + c)
        nothing = tl.zeros_like(c)
        x = ((nothing, nothing, nothing, nothing),) * 5
    else:
        words_at = _advance(words_at, 32 * block + 8 * c)
        words = ()
        for i in tl.static_range(AHEAD):
            words = words + (_load_words(words_at, skews, 32 * i, 3, some, False, PTX),)  # noqa: RUF005
        xs = x_lanes + X_BLOCK * block.to(tl.int64)
    mine = block if WORDS else block + c
    digits = _load_digits(digit_rows, strides, mine, c, some, groups, ROWS, GROUP, WORDS, PTX)

    if 160 * blocks < K:
        sums = _add_rest(
            sums, starts, digit_rows, strides, x_rows, K, blocks, warp, c, live,
            K_WARPS, GROUP, TILES, PTX,
        )  # fmt: skip
    if LEFT > 0:
        scales = _scales(left_digits, c, ROWS, False, PTX)
        left_xs = x_lanes + X_BLOCK * left.to(tl.int64)
    for i in tl.static_range(LEFT):
        some = (left + i * K_WARPS < blocks) & live
        qs = _begin(left_words[i], 0, skews, PTX)
        sums = _add_block(sums, qs, left_xs, K_WARPS * i, some, scales, i, c, TILES, True, PTX)
    for turn in range(rounds):
        more = tl.zeros_like(c) + (turn + 1) < rounds
        scales = _scales(digits, c, ROWS, WORDS, PTX)
        mine += STEP
        digits = _load_digits(digit_rows, strides, mine, c, more, groups, ROWS, GROUP, WORDS, PTX)
        if ABREAST == 4:
            words_at = _advance(words_at, 32 * STEP)
            now = words
            words = _load_words(words_at, skews, 0, 9, more, False, PTX)
            one, x = _add_four_blocks(sums[0], now, skews, xs, x, own, scales, PTX)
            sums = (one,)
            xs += 320 * STEP
        else:
            for i in tl.static_range(4):
                qs = _begin(words[0], 0, skews, PTX)
                if i + AHEAD < 4:
                    later = _load_words(words_at, skews, 32 * (i + AHEAD), 3, c >= 0, False, PTX)
                else:
                    later = _load_words(
                        words_at, skews, 32 * (STEP + i + AHEAD - 4), 3, more, False, PTX
                    )
                words = words[1:] + (later,)  # noqa: RUF005
                sums = _add_block(sums, qs, xs, i, None, scales, i, c, TILES, False, PTX)
            words_at = _advance(words_at, 32 * STEP)
            xs += X_BLOCK * STEP

    lane = tl.arange(0, 32 * N_WARPS)
    n = first_n + lane // 32 * (16 * HEIGHT) + lane % 32 // 4
    for tile in tl.static_range(TILES):
        for i in tl.static_range(4 * HEIGHT):
            share = sums[tile * HEIGHT + i // 4][i % 4]
            y = tl.sum(tl.reshape(share, (K_WARPS, 32 * N_WARPS)), axis=0)
            if ABREAST == 4:  # the four threads of a row have summed different blocks
                y = tl.reshape(y, (8 * N_WARPS, 4))
                y = tl.reshape(tl.broadcast_to(tl.sum(y, axis=1)[:, None], y.shape), lane.shape)
            y /= 4  # trits and scales are both twice too large
            m = 8 * tile + lane % 4 * 2 + i % 2
            row = n + 8 * (i // 2)
            y_ptrs = y_ptr + m.to(tl.int64) * stride_ym + row * stride_yn
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < M) & (row < N))


def fits_few_rows(x: Tensor, packed: Packed) -> bool:
    """Return whether `few_rows` applies: few bf16 rows, trits, groups of whole planes."""
    if packed.remainder is not None:
        return False
    few = x.dtype == torch.bfloat16 and x.shape[0] <= FEW_ROWS and torch.version.hip is None
    return few and packed.group_size % PLANE == 0 and packed.trits.stride(1) == 1


def few_rows(x: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
    """Multiply (M, K) `x` by a packed matrix, if `fits_few_rows`; (M, N) in `dtype`."""
    (rows, in_features), out_features = x.shape, packed.out_features
    y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = _on_16_bytes(x)
    _, exponent, fraction = packed.pointers
    words = packed.group_size == PLANE and _in_words(exponent) and _in_words(fraction)
    processors = num_processors(x) if x.is_cuda else _PROCESSORS
    plan, registers = _plan(rows, out_features, words, processors)
    tiles, k_warps = plan["TILES"], plan["K_WARPS"]
    left = triton.cdiv(in_features // BLOCK % (4 * k_warps), k_warps)
    grid = (triton.cdiv(out_features, 16 * plan["HEIGHT"] * plan["N_WARPS"]),)
    stride_pn, _, *scale_strides = packed.strides
    _few_rows_kernel[grid](
        x, _tiled(x, in_features, tiles) if tiles > 1 else x, *packed.pointers, y,
        rows, out_features, in_features, x.stride(0), stride_pn, *scale_strides, *y.stride(),
        **packed.constants, WORDS=words, LEFT=left, PTX=HAS_PTX,
        **plan, maxnreg=registers, num_warps=plan["N_WARPS"] * k_warps,
    )  # fmt: skip
    return y


def _plan(
    rows: int, out_features: int, words: bool, processors: int
) -> tuple[dict[str, int], int | None]:
    """Choose the partition among warps such that all warps are resident at once if possible.

    Returns:
        Constants of the kernel, and the maximum number of registers per thread; None sets no limit.
    """
    sixteens = triton.cdiv(out_features, 16 * processors)  # tiles of 16 rows per multiprocessor
    many = sixteens > 4
    tiles = next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)
    plan = {"TILES": tiles, "N_WARPS": 1, "HEIGHT": 1, "AHEAD": 2 if tiles == 1 else 1}
    plan["K_WARPS"] = 2 if many else 4
    plan["ABREAST"] = 4 if rows <= 2 else 1
    if tiles > 2:
        plan |= {"N_WARPS": 4, "K_WARPS": 2}
    elif many and rows > 2:
        plan |= {"N_WARPS": 2, "HEIGHT": 2}
    elif sixteens > 6:
        plan |= {"N_WARPS": 2}
    # a multiprocessor has 128 registers per thread for 16 warps, and 168 for 12
    crowded = sixteens * plan["K_WARPS"] > 12 and tiles * plan["HEIGHT"] == 1
    return plan, 128 if words and crowded else None


def _tiled(x: Tensor, in_features: int, tiles: int) -> Tensor:
    """Copy x to (planes, rows, 32), so that each load of a warp is contiguous."""
    rows, planes = len(x), in_features // BLOCK * 5
    tiled = x.new_empty(planes, 8 * tiles, PLANE)
    whole = x[:, : PLANE * planes].view(rows, planes, PLANE)
    tiled[:, :rows].copy_(whole.transpose(0, 1))
    return tiled


def _on_16_bytes(x: Tensor) -> Tensor:
    """Copy `x` unless its eights of elements are aligned to 16 bytes."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8))


def _in_words(digits: Tensor) -> bool:
    """Return whether the scale digits of a row are aligned, so that four can be loaded at once."""
    return digits.stride(1) == 1 and digits.stride(0) % 4 == 0 and digits.data_ptr() % 4 == 0

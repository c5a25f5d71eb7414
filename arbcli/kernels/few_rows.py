"""The product y = x @ w.T for few rows of bf16 x, where reading w is what takes the time.

A tensor here has one element a thread. A warp takes 16 rows of w and a share of their bytes, and
multiplies with `mma.m16n8k16`: 16 rows of w by 16 columns, times 8 rows of x. Thread 4 r + c of a
warp holds what that instruction wants of it, and nothing passes through shared memory:

- of w, the bytes 8 c .. 8 c + 7 of every block of rows r and r + 8 of the sixteen;
- of x, for each digit of these bytes, the eight elements of row r that meet it;
- of y, rows r and r + 8 of the sixteen by the elements 2 c and 2 c + 1 of the eight rows of x.

A byte becomes five bf16 trits in eleven instructions (`_trits`). Each digit of a block is a plane
of 32 weights within one group, so its scale multiplies 32 products at once. A warp reads the
planes of four blocks together: 20 scales, five to a thread, which its neighbours ask it for.
"""

import torch
from torch import Tensor

from arbcli.kernels._triton import INTERPRETED, tl, triton
from arbcli.kernels.decode_weight import scale_of
from arbcli.kernels.packing import PLANE

FEW_ROWS = 64
"""Largest M that is faster here than with weights decoded once."""
BLOCKS = 4
"""Blocks of 160 weights that a warp takes at a time: 20 planes, whose scales fill 5 words."""
WARPS = 4
"""Warps that share the blocks of 16 rows; at least two."""
HAS_PTX = not INTERPRETED
"""Whether kernels may contain PTX. The interpreter computes the same in plain Triton, slowly."""
_SIZES = ("M", "N", "K", "row_bytes", *(f"stride_{n}" for n in ("xm", "pn", "en", "fn", "ym")))
"""Arguments of the kernel that it is not compiled anew for."""


def _trits_ptx() -> str:
    lines = ["{", ".reg .b32 q;"]
    for half, bytes_of_half in enumerate(("0x4140", "0x4342")):
        lines += [f"prmt.b32 q, $10, 0, {bytes_of_half};", "mad.lo.u32 q, q, 202, 0x850085;"]
        for digit in (4, 3, 2, 1, 0):
            trits = f"${2 * digit + half}"
            if digit % 2 == 0:
                lines += [
                    f"lop3.b32 {trits}, q, 0x40004000, 0xC000C000, 0x28;",  # (q ^ ..) & ..
                    f"mul.lo.u32 q, q, 3; sub.u32 q, q, {trits};",
                ]
            else:
                lines += [
                    f"and.b32 {trits}, q, 0xC000C000;",
                    f"mad.lo.u32 q, q, 3, {trits};",
                ]
    return "\n".join([*lines, "}"])


_TRITS = tl.constexpr(_trits_ptx())
_TRITS_REGISTERS = tl.constexpr(",".join(["=&r"] * 10 + ["r"]))
_FROM_LANE = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;")
_SHIFT_PAIR = tl.constexpr("shf.r.wrap.b32 $0, $1, $2, $3;")
_MULTIPLY = tl.constexpr("""{
.reg .b32 x<4>;
mov.b64 {x0, x1}, $12;
mov.b64 {x2, x3}, $13;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {x0, x1}, {$14, $14, $14, $14};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {x2, x3}, {$0, $1, $2, $3};
}""")
_MULTIPLY_REGISTERS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 8 + ["l"] * 2 + ["f"]))


@triton.jit
def _trits(word, PTX: tl.constexpr):
    """Decode four bytes to ten words: 2 d and 2 d + 1 hold digit d of bytes 0, 1 and of 2, 3.

    A half of such a word is a bf16: 2 T for digits 1 and 3, -2 T for 0, 2 and 4.

    A byte B lies in 16 bits as q = 202 B + 133, near enough to B / 81 in units of 2**-14: the top
    two bits of q are its highest digit, 0..2, and what follows is the rest. With the lower of
    them flipped they are -T mod 4, and at the top of a bf16 mean -2 T: 00 is 0, 01 is 2, 11 is -2.
    Then 3 q minus what was read leaves the next digit less 1, which is T, and 3 q plus that leaves
    the digit after it, mod 4. Two bytes share a register, as what one half carries into the other
    is too little to change a digit.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _TRITS, _TRITS_REGISTERS, [word], dtype=(tl.int32,) * 10, is_pure=True, pack=1
        )
    low = ((word & 0xFF) | ((word & 0xFF00) << 8)) * 202 + 0x850085
    high = (((word >> 16) & 0xFF) | ((word >> 8) & 0xFF0000)) * 202 + 0x850085
    trits = ()
    for step in tl.static_range(5):
        if step % 2 == 0:
            pair = ((low ^ 0x40004000) & -0x3FFF4000, (high ^ 0x40004000) & -0x3FFF4000)
            low, high = low * 3 - pair[0], high * 3 - pair[1]
        else:
            pair = (low & -0x3FFF4000, high & -0x3FFF4000)
            low, high = low * 3 + pair[0], high * 3 + pair[1]
        trits = pair + trits
    return trits


@triton.jit
def _from_lane(value, lane, PTX: tl.constexpr):
    """Fetch an int32 or float32 of another of the four threads of a row; `lane` is its c."""
    if PTX:
        REGISTERS: tl.constexpr = "=f,f,r" if value.dtype == tl.float32 else "=r,r,r"
        return tl.inline_asm_elementwise(
            _FROM_LANE, REGISTERS, [value, lane], dtype=value.dtype, is_pure=True, pack=1
        )
    thread = tl.arange(0, value.shape[0])
    return tl.gather(value, thread // 4 * 4 + lane, 0)


@triton.jit
def _shift_pair(low, high, bits, PTX: tl.constexpr):
    """Take 32 of 64 bits, from bit `bits` mod 32 on."""
    if PTX:
        return tl.inline_asm_elementwise(
            _SHIFT_PAIR, "=r,r,r,r", [low, high, bits], dtype=tl.int32, is_pure=True, pack=1
        )
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return (both >> (bits & 31).to(tl.int64)).to(tl.int32)


@triton.jit
def _multiply(upper, lower, x, digit: tl.constexpr, PTX: tl.constexpr):
    """Multiply one digit of the bytes a warp holds by 8 rows of x.

    Args:
        upper: trits of row r of w, of bytes 8 c .. 8 c + 3 and of the four after them.
        lower: trits of row r + 8.
        x: the eight bf16 elements, as two int64.
        digit: which of the trits.
        PTX: whether PTX is understood.

    Returns:
        Sums of rows r, r, r + 8, r + 8 of w by rows 2 c, 2 c + 1, 2 c, 2 c + 1 of x.
    """
    even: tl.constexpr = 2 * digit
    odd: tl.constexpr = 2 * digit + 1
    a = (upper[0][even], upper[0][odd], upper[1][even], upper[1][odd])
    b = (lower[0][even], lower[0][odd], lower[1][even], lower[1][odd])
    if PTX:
        return tl.inline_asm_elementwise(
            _MULTIPLY, _MULTIPLY_REGISTERS,
            [a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3], x[0], x[1], 0.0],
            dtype=(tl.float32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
    return _multiply_row(a, x) + _multiply_row(b, x)


@triton.jit
def _multiply_row(trits, x):
    THREADS: tl.constexpr = x[0].shape[0]
    sums = tl.zeros((THREADS // 32, 8, 8), tl.float32)
    for i in tl.static_range(4):
        pair = (x[i // 2] >> (32 * (i % 2))).to(tl.int32)
        sums += _multiply_lanes(trits[i] << 16, pair << 16)
        sums += _multiply_lanes(trits[i] & -0x10000, pair & -0x10000)
    return tl.split(tl.reshape(sums, (THREADS, 2)))


@triton.jit
def _multiply_lanes(w_bits, x_bits):
    WARPS: tl.constexpr = w_bits.shape[0] // 32
    w = tl.reshape(w_bits.to(tl.float32, bitcast=True), (WARPS, 8, 1, 4))
    x = tl.reshape(x_bits.to(tl.float32, bitcast=True), (WARPS, 1, 8, 4))
    return tl.sum(w * x, axis=3)


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    return tl.load(pointer)


@triton.jit
def _find_row(
    n, packed_ptr, exponent_ptr, fraction_ptr, row_bytes, stride_pn, stride_en, stride_fn
):
    """Find row n of w: its int64 words, the bit it begins at, where it ends, and its scales."""
    start = packed_ptr + n * stride_pn
    skew = (start.to(tl.int64) & 7).to(tl.int32)
    words = (start - skew).to(tl.pointer_type(tl.int64))
    exponents, fractions = exponent_ptr + n * stride_en, fraction_ptr + n * stride_fn
    return words, 8 * skew, row_bytes + skew, exponents, fractions


@triton.jit
def _load_words(row, block, c, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """Load the c-th eight bytes of `COUNT` blocks, and the first eight of the block after them."""
    words, _, end, _, _ = row
    loaded = ()
    for i in tl.static_range(COUNT):
        mask = 32 * (block + i) + 8 * c < end
        loaded = loaded + (_load(words + (4 * block + c) + 4 * i, mask, MASKED),)  # noqa: RUF005
    after = block + COUNT
    return loaded + (_load(words + 4 * after, 32 * after < end, True),)  # noqa: RUF005


@triton.jit
def _shift_words(word, following, row, c, PTX: tl.constexpr):
    """Shift eight bytes of a row into place, as two int32: a row may begin at any byte."""
    offered = tl.where(c == 0, following, word)
    w0, w1 = word.to(tl.int32), (word >> 32).to(tl.int32)
    w2 = _from_lane(offered.to(tl.int32), (c + 1) % 4, PTX)
    w3 = _from_lane((offered >> 32).to(tl.int32), (c + 1) % 4, PTX)
    skew = row[1]
    far = skew >= 32
    w0, w1, w2 = tl.where(far, w1, w0), tl.where(far, w2, w1), tl.where(far, w3, w2)
    return _shift_pair(w0, w1, skew, PTX), _shift_pair(w1, w2, skew, PTX)


@triton.jit
def _decode(words, i: tl.constexpr, row, c, PTX: tl.constexpr):
    """Decode a thread's eight bytes of the i-th of the blocks loaded."""
    first, second = _shift_words(words[i], words[i + 1], row, c, PTX)
    return _trits(first, PTX), _trits(second, PTX)


@triton.jit
def _load_digits(
    digits_ptr, stride, block, groups, c,
    GROUP: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load five digits of scales: of the planes 4 c .. 4 c + 3 and 16 + c from a block on."""
    first = 5 * block
    if WORDS:
        words = (digits_ptr + (first + 4 * c)).to(tl.pointer_type(tl.int32))
        word = _load(words, first + 4 * c < groups, MASKED)
        last = _load(digits_ptr + (first + c) + 16, first + c + 16 < groups, MASKED).to(tl.int32)
        return (word << 24) >> 24, (word << 16) >> 24, (word << 8) >> 24, word >> 24, last
    digits = ()
    for i in tl.static_range(5):
        plane = (4 * c + i) if i < 4 else (16 + c)
        group = (first + plane) // (GROUP // 32)
        digit = _load(digits_ptr + group * stride, group < groups, MASKED).to(tl.int32)
        digits = digits + (digit,)  # noqa: RUF005
    return digits


@triton.jit
def _scales(exponents, fractions):
    scales = ()
    for i in tl.static_range(5):
        scales = scales + (scale_of(exponents[i], fractions[i]),)  # noqa: RUF005
    return scales


@triton.jit
def _scale_of_plane(scales, plane: tl.constexpr, PTX: tl.constexpr):
    """Fetch the scale of one of 20 planes from the thread of the row that built it."""
    if plane < 16:
        return _from_lane(scales[plane % 4], plane // 4, PTX)
    return _from_lane(scales[4], plane - 16, PTX)


@triton.jit
def _load_blocks(
    rows, block, groups, strides, c,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load what a thread holds of some blocks of both its rows: words, digits of five scales."""
    loaded = ()
    for i in tl.static_range(2):
        words = _load_words(rows[i], block, c, BLOCKS, MASKED)
        exponents = _load_digits(rows[i][3], strides[0], block, groups, c, GROUP, WORDS, MASKED)
        if HAS_FRACTION:
            fractions = _load_digits(rows[i][4], strides[1], block, groups, c, GROUP, WORDS, MASKED)
        else:
            fractions = (tl.zeros_like(c),) * 5
        loaded = loaded + ((words, exponents, fractions),)  # noqa: RUF005
    return loaded


@triton.jit
def _add_plane(sums, tile: tl.constexpr, products, scales, digit: tl.constexpr):
    """Add the products of a plane with a tile of 8 rows of x, scaled; even digits are negated."""
    a, b, c, d = sums[tile]
    if digit % 2 == 0:
        a, b = a - products[0] * scales[0], b - products[1] * scales[0]
        c, d = c - products[2] * scales[1], d - products[3] * scales[1]
    else:
        a, b = a + products[0] * scales[0], b + products[1] * scales[0]
        c, d = c + products[2] * scales[1], d + products[3] * scales[1]
    return sums[:tile] + ((a, b, c, d),) + sums[tile + 1 :]  # noqa: RUF005


@triton.jit
def _add_blocks(
    sums, rows, loaded, xs, block, blocks, c,
    BLOCKS: tl.constexpr, PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the products of blocks that were loaded; with `MASKED`, of those that there are."""
    upper_words, upper_exponents, upper_fractions = loaded[0]
    lower_words, lower_exponents, lower_fractions = loaded[1]
    upper_scales = _scales(upper_exponents, upper_fractions)
    lower_scales = _scales(lower_exponents, lower_fractions)
    for i in tl.static_range(BLOCKS):
        upper = _decode(upper_words, i, rows[0], c, PTX)
        lower = _decode(lower_words, i, rows[1], c, PTX)
        for digit in tl.static_range(5):
            scales = (
                _scale_of_plane(upper_scales, 5 * i + digit, PTX),
                _scale_of_plane(lower_scales, 5 * i + digit, PTX),
            )
            for tile in tl.static_range(len(xs)):
                eight = xs[tile] + 160 * block + (160 * i + 32 * digit)
                pair = tl.multiple_of(eight.to(tl.pointer_type(tl.int64)), 16)
                pair = pair[:, None] + tl.arange(0, 2)[None, :]
                x = tl.split(_load(pair, (block + i < blocks)[:, None], MASKED))
                products = _multiply(upper, lower, x, digit, PTX)
                sums = _add_plane(sums, tile, products, scales, digit)
    return sums


@triton.jit
def _load_x_within(x_ptr, first, limit, group, c, GROUP: tl.constexpr):
    """Load the eight elements from first + 8 c on, but 0 from `limit` on and outside of `group`."""
    x = ()
    for j in tl.static_range(2):
        four = tl.zeros(c.shape, tl.int64)
        for i in tl.static_range(4):
            k = first + 8 * c + (4 * j + i)
            mask = (k < limit) & (k // GROUP == group)
            bits = tl.load((x_ptr + k).to(tl.pointer_type(tl.int16)), mask=mask, other=0)
            four |= (bits.to(tl.int64) & 0xFFFF) << (16 * i)
        x = x + (four,)  # noqa: RUF005
    return x


@triton.jit
def _add_short_block(
    sums, rows, xs, K, block, strides, warp, c,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of the last block, whose planes are narrower and meet up to two groups.

    The first warp takes the earlier group of every plane and the second the later one.
    """
    width = (K - 160 * block + 4) // 5
    upper = _decode(_load_words(rows[0], block, c, 1, True), 0, rows[0], c, PTX)
    lower = _decode(_load_words(rows[1], block, c, 1, True), 0, rows[1], c, PTX)
    for digit in tl.static_range(5):
        first = 160 * block + width * digit
        limit = tl.minimum(tl.where(warp < 2, first + width, 0), K)
        group = first // GROUP + warp
        scales = ()
        for i in tl.static_range(2):
            mask = GROUP * group < limit
            exponent = tl.load(rows[i][3] + group * strides[0], mask=mask, other=0)
            fraction = tl.zeros_like(exponent)
            if HAS_FRACTION:
                fraction = tl.load(rows[i][4] + group * strides[1], mask=mask, other=0)
            scales = scales + (scale_of(exponent, fraction),)  # noqa: RUF005
        for tile in tl.static_range(len(xs)):
            x = _load_x_within(xs[tile] - 8 * c, first, limit, group, c, GROUP)
            products = _multiply(upper, lower, x, digit, PTX)
            sums = _add_plane(sums, tile, products, scales, digit)
    return sums


@triton.jit(do_not_specialize=_SIZES)
def _few_rows_kernel(
    x_ptr, packed_ptr, exponent_ptr, fraction_ptr, y_ptr,
    M, N, K, row_bytes,
    stride_xm, stride_pn, stride_en, stride_eg, stride_fn, stride_fg, stride_ym, stride_yn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, WORDS: tl.constexpr,
    WARPS: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    # programs that read the same rows of w follow each other
    m_tiles = tl.cdiv(M, 8 * TILES)
    first_m = tl.program_id(0) % m_tiles * (8 * TILES)
    first_n = tl.program_id(0) // m_tiles * 16
    rows, xs, sums = (), (), ()
    for i in tl.static_range(2):
        n = tl.minimum(first_n + 8 * i + r, N - 1).to(tl.int64)
        row = _find_row(
            n, packed_ptr, exponent_ptr, fraction_ptr, row_bytes, stride_pn, stride_en, stride_fn
        )
        rows = rows + (row,)  # noqa: RUF005
    for tile in tl.static_range(TILES):
        m = tl.minimum(first_m + 8 * tile + r, M - 1).to(tl.int64)
        xs = xs + (x_ptr + (m * stride_xm + 8 * c),)  # noqa: RUF005
        sums = sums + ((tl.zeros(thread.shape, tl.float32),) * 4,)  # noqa: RUF005

    # rounds in which every warp has all its blocks, then one for the blocks that are left
    blocks, groups = K // 160, tl.cdiv(K, GROUP)
    step: tl.constexpr = BLOCKS * WARPS
    rounds = blocks // step
    block = BLOCKS * warp
    strides = (stride_eg, stride_fg)
    if AHEAD:
        loaded = _load_blocks(
            rows, block, groups, strides, c, BLOCKS, GROUP, HAS_FRACTION, WORDS, True
        )
    for turn in range(rounds):
        if AHEAD:
            following = block + tl.where(turn + 1 < rounds, step, 0)
            ahead = _load_blocks(
                rows, following, groups, strides, c, BLOCKS, GROUP, HAS_FRACTION, WORDS, False
            )
        else:
            loaded = _load_blocks(
                rows, block, groups, strides, c, BLOCKS, GROUP, HAS_FRACTION, WORDS, False
            )
        sums = _add_blocks(sums, rows, loaded, xs, block, blocks, c, BLOCKS, PTX, False)
        if AHEAD:
            loaded = ahead
        block += step
    if rounds * step < blocks:
        loaded = _load_blocks(
            rows, block, groups, strides, c, BLOCKS, GROUP, HAS_FRACTION, WORDS, True
        )
        sums = _add_blocks(sums, rows, loaded, xs, block, blocks, c, BLOCKS, PTX, True)
    if 160 * blocks < K:
        sums = _add_short_block(
            sums, rows, xs, K, blocks, strides, warp, c, GROUP, HAS_FRACTION, PTX
        )

    lane = tl.arange(0, 32)
    for tile in tl.static_range(TILES):
        for i in tl.static_range(4):
            n = first_n + lane // 4 + 8 * (i // 2)
            m = first_m + 8 * tile + lane % 4 * 2 + i % 2
            y = tl.sum(tl.reshape(sums[tile][i], (WARPS, 32)), axis=0) / 2  # trits were doubled
            y_ptrs = y_ptr + m.to(tl.int64) * stride_ym + n * stride_yn
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < M) & (n < N))


def takes(x: Tensor, packed: Tensor, group_size: int) -> bool:
    """Whether `few_rows` can: up to `FEW_ROWS` rows of bf16, and groups of whole planes."""
    few = x.dtype == torch.bfloat16 and x.shape[0] <= FEW_ROWS and torch.version.hip is None
    return few and group_size % PLANE == 0 and packed.stride(1) == 1


def few_rows(
    x: Tensor,
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply `x`, of which `takes` approves, by a packed matrix; (M, N) in `dtype`."""
    (rows, in_features), out_features = x.shape, packed.shape[0]
    y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = _on_16_bytes(x)
    digits = exponent if fraction is None else fraction
    tiles = 1 if rows <= 8 else 2
    words = group_size == PLANE and _in_words(exponent) and _in_words(digits)
    ahead = words and tiles == 1  # else there are not enough registers
    grid = (triton.cdiv(rows, 8 * tiles) * triton.cdiv(out_features, 16),)
    _few_rows_kernel[grid](
        x, packed, exponent, digits, y, rows, out_features, in_features, packed.shape[1],
        x.stride(0), packed.stride(0), *exponent.stride(), *digits.stride(), *y.stride(),
        GROUP=group_size, HAS_FRACTION=fraction is not None,
        WORDS=words, WARPS=WARPS, BLOCKS=BLOCKS, TILES=tiles, AHEAD=ahead, PTX=HAS_PTX,
        num_warps=WARPS, maxnreg=168 if tiles == 1 else None,  # 168: three warps a scheduler
    )  # fmt: skip
    return y


def _on_16_bytes(x: Tensor) -> Tensor:
    """Copy `x` unless every eight of its elements can be loaded at once."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8))


def _in_words(digits: Tensor) -> bool:
    """Whether four digits of a row, from the fourth, eighth .. on, can be loaded at once."""
    return digits.stride(1) == 1 and digits.stride(0) % 4 == 0 and digits.data_ptr() % 4 == 0

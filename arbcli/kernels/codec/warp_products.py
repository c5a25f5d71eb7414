"""Decode packed trits in registers and multiply them by bf16 x with tensor-core instructions.

Tensors here have one element per thread. The instruction `mma.m16n8k16` multiplies 16 rows of w by
8 rows of x over 16 columns. Thread 4 r + c of a warp supplies and receives:

- w: eight bytes of rows r and r + 8; each of their five digits has eight weights of a plane;
- x: for each digit, the eight elements of row r that these weights are multiplied by;
- y: products of rows r and r + 8 of w with rows 2 c and 2 c + 1 of x.

Columns of the instruction, and columns of a plane of 32 weights, by thread:

    instruction k     0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15      16 deep, of a thread
    thread c           0     1     2     3     0      1       2       3        four: 2 c, 2 c + 1,
                                                                               2 c + 8, 2 c + 9
    plane, thread c   8 c .. 8 c + 7: four of them for each of two instructions

Reason: a sum does not depend on the order of its terms. So the columns of w and x are permuted in
    the same way, and a thread multiplies the eight contiguous elements that it has loaded, without
    shuffles.

Triton's interpreter cannot execute PTX, so each operation also has a version in plain Triton.
"""

from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton

HAS_PTX = not INTERPRETED
"""Whether kernels may contain PTX. The interpreter computes the same in plain Triton, slowly."""
_SPREAD = tl.constexpr("""
prmt.b32 $0, $2, 0, 0x4140; mad.lo.u32 $0, $0, 202, 0x850085;
prmt.b32 $1, $2, 0, 0x4342; mad.lo.u32 $1, $1, 202, 0x850085;
""")
_EVEN_DIGIT = tl.constexpr("""
lop3.b32 $0, $2, 0x40004000, 0xC000C000, 0x28;  // (q ^ ..) & ..
mad.lo.s32 $1, $2, -3, $0;
""")
_ODD_DIGIT = tl.constexpr("""
lop3.b32 $0, $2, 0xC000C000, 0, 0x0C;  // ~q & ..
mad.lo.s32 $1, $2, -3, $0;
""")
_READ_LANE = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;")
_SHIFT_PAIR = tl.constexpr("shf.r.wrap.b32 $0, $1, $2, $3;")
_ROUND_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_UNPAIR = tl.constexpr(
    "\n".join(
        f"shl.b32 ${2 * i}, ${8 + i}, 16; and.b32 ${2 * i + 1}, ${8 + i}, 0xFFFF0000;"
        for i in range(4)
    )
)
_MULTIPLY_PAIRS = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
_MULTIPLY = tl.constexpr("""
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$12, $13}, {$16, $17, $18, $19};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$14, $15}, {$0, $1, $2, $3};
""")
_MULTIPLY_BYTES = tl.constexpr("""
mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};
""")
_MULTIPLY_BYTES_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,0,1,2,3")
_MULTIPLY_REGISTERS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))


@triton.jit
def spread(word, PTX: tl.constexpr):
    """Spread four bytes to 16 bits each: two int32, of bytes 0 and 1 and of bytes 2 and 3."""
    if PTX:
        return tl.inline_asm_elementwise(
            _SPREAD, "=&r,=&r,r", [word], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )
    low = (word & 0xFF) | ((word & 0xFF00) << 8)
    high = ((word >> 16) & 0xFF) | ((word >> 8) & 0xFF0000)
    return first_digits(low), first_digits(high)


@triton.jit
def first_digits(two):
    """Convert two bytes, in 16 bits each, to the fixed-point numbers of `take_digits`.

    A byte B becomes q = 202 B + 133, about B / 81 in units of 2**-14, which is exact enough for all
    243 bytes: the top two bits of q are the highest digit, 0..2, and the others the fraction.
    """
    return two * 202 + 0x850085


@triton.jit
def _take_digit(q, digit: tl.constexpr, PTX: tl.constexpr):
    """Decode the next digit of two bytes; return it and the rest of the bytes.

    Returns:
        Two bf16, 2 T for odd digits and -2 T for even ones, and q for the next digit.

    Why this works, with T = d - 1 and q counted in units of its second highest bit, mod 4:
    - Even digit: q = d + f, d the digit and 0 <= f < 1 the fraction. The top two bits are d;
      flipping the lower one gives -T mod 4. As the top bits of a bf16, 00 is 0, 01 is 2 and 11 is
      -2, which is -2 T. Then -3 q - T = -3 d - T - 3 f = 1 - 3 f mod 4.
    - Odd digit: so q is 1 - 3 f of the digit before, which is 1 - d' - f' with d' + f' = 3 f the
      new digit and its fraction. Its top two bits are those of -d'; flipping both gives T mod 4,
      so the bf16 is 2 T. Then -3 q + T = 3 f' mod 4, what an even digit starts from.
    Two bytes share a register: a carry from the lower half is too small to change a digit above.
    """
    if PTX:
        CODE: tl.constexpr = _EVEN_DIGIT if digit % 2 == 0 else _ODD_DIGIT
        trits, q = tl.inline_asm_elementwise(
            CODE, "=&r,=&r,r", [q], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )
    else:
        FLIP: tl.constexpr = 0x40004000 if digit % 2 == 0 else -1
        trits = (q ^ FLIP) & -0x3FFF4000
        q = trits - 3 * q
    return trits, q


@triton.jit
def take_digits(qs, digit: tl.constexpr, PTX: tl.constexpr):
    """Decode one digit of all bytes from `spread`; call it for digits 4, 3, 2, 1, 0 in order."""
    trits, rest = (), ()
    for i in tl.static_range(len(qs)):
        two, q = _take_digit(qs[i], digit, PTX)
        trits = trits + (two,)  # noqa: RUF005
        rest = rest + (q,)  # noqa: RUF005
    return trits, rest


@triton.jit
def unpair(two):
    """Split a pair of bf16 into two float32."""
    return (two << 16).to(tl.float32, bitcast=True), (two & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def unpair_four(words):
    """Split four pairs of bf16 into eight float32."""
    eight = ()
    for i in tl.static_range(4):
        eight = eight + unpair(words[i])
    return eight


@triton.jit
def unpair_again(words, PTX: tl.constexpr):
    """Split four pairs of bf16 like `unpair_four`, but recompute the result at every use.

    The result needs eight registers instead of four, so a loop that reuses words saves registers.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _UNPAIR, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r",
            [words[0], words[1], words[2], words[3]],
            dtype=(tl.float32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
    return unpair_four(words)


@triton.jit
def pair(low, high):
    """Join two float32, exact in bf16, to a pair of bf16."""
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def round_pair(low, high, PTX: tl.constexpr):
    """Round two float32 to a pair of bf16, to nearest even."""
    if PTX:
        return tl.inline_asm_elementwise(
            _ROUND_PAIR, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    return ((_round_up(low) >> 16) & 0xFFFF) | (_round_up(high) & -0x10000)


@triton.jit
def _round_up(value):
    bits = value.to(tl.int32, bitcast=True)
    return bits + 0x7FFF + ((bits >> 16) & 1)


@triton.jit
def shift_pair(low, high, bits, PTX: tl.constexpr):
    """Read 32 of the 64 bits of (low, high), from bit `bits` mod 32 on."""
    if PTX:
        return tl.inline_asm_elementwise(
            _SHIFT_PAIR, "=r,r,r,r", [low, high, bits], dtype=tl.int32, is_pure=True, pack=1
        )
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return (both >> (bits & 31).to(tl.int64)).to(tl.int32)


@triton.jit
def read_lane(value, lane, PTX: tl.constexpr):
    """Fetch an int32 or float32 from thread c = `lane` among the four threads of a row."""
    if PTX:
        REGISTERS: tl.constexpr = "=f,f,r" if value.dtype == tl.float32 else "=r,r,r"
        return tl.inline_asm_elementwise(
            _READ_LANE, REGISTERS, [value, lane], dtype=value.dtype, is_pure=True, pack=1
        )
    thread = tl.arange(0, value.shape[0])
    return tl.gather(value, thread // 4 * 4 + lane, 0)


@triton.jit
def multiply_pairs(a, b, PTX: tl.constexpr):
    """Multiply two pairs of bf16 with products that are exact in bf16; a zero product is +0."""
    if PTX:
        return tl.inline_asm_elementwise(
            _MULTIPLY_PAIRS, "=r,r,r,r", [a, b, tl.zeros_like(a)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    first, second = unpair(a), unpair(b)
    return pair(first[0] * second[0] + 0.0, first[1] * second[1] + 0.0)


@triton.jit
def add_products(sums, trits, x, PTX: tl.constexpr):
    """Add the products of one digit of a warp's bytes and 8 rows of x.

    Args:
        sums: float32 sums of rows r, r, r + 8, r + 8 of w by rows 2 c, 2 c + 1, 2 c, 2 c + 1 of x.
        trits: four pairs of bf16 of row r of w, and four of row r + 8.
        x: eight bf16 of x, as four int32.
        PTX: whether the compiler accepts PTX.
    """
    a, b = trits[:4], trits[4:]
    if PTX:
        return tl.inline_asm_elementwise(
            _MULTIPLY, _MULTIPLY_REGISTERS,
            [
                a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3],
                x[0], x[1], x[2], x[3], sums[0], sums[1], sums[2], sums[3],
            ],
            dtype=(tl.float32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
    upper, lower = _multiply_row(a, x), _multiply_row(b, x)
    return sums[0] + upper[0], sums[1] + upper[1], sums[2] + lower[0], sums[3] + lower[1]


@triton.jit
def _multiply_row(trits, x):
    THREADS: tl.constexpr = x[0].shape[0]
    sums = tl.zeros((THREADS // 32, 8, 8), tl.float32)
    for i in tl.static_range(4):
        of_w, of_x = unpair(trits[i]), unpair(x[i])
        for j in tl.static_range(2):
            sums += _multiply_lanes(of_w[j], of_x[j])
    return tl.split(tl.reshape(sums, (THREADS, 2)))


@triton.jit
def _multiply_lanes(w, x):
    WARPS: tl.constexpr = w.shape[0] // 32
    return tl.sum(tl.reshape(w, (WARPS, 8, 1, 4)) * tl.reshape(x, (WARPS, 1, 8, 4)), axis=3)


@triton.jit
def add_byte_products(sums, codes, x, PTX: tl.constexpr):
    """Add the products of 16 rows of 32 codes and 8 rows of 32 integers.

    Args:
        sums: int32 sums of rows r, r, r + 8, r + 8 of w by rows 2 c, 2 c + 1, 2 c, 2 c + 1 of x.
        codes: four bytes of row r of w, four of row r + 8, then the next four of each: 0..255.
        x: two words of four bytes of row r of x: -128..127.
        PTX: whether the compiler accepts PTX.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _MULTIPLY_BYTES, _MULTIPLY_BYTES_REGISTERS,
            [codes[0], codes[1], codes[2], codes[3], x[0], x[1],
             sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.int32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
    upper = _multiply_byte_row(codes[0], codes[2], x)
    lower = _multiply_byte_row(codes[1], codes[3], x)
    return sums[0] + upper[0], sums[1] + upper[1], sums[2] + lower[0], sums[3] + lower[1]


@triton.jit
def _multiply_byte_row(first, second, x):
    WARPS: tl.constexpr = first.shape[0] // 32
    place = 8 * tl.arange(0, 4)[None, None, :]
    of_w = (tl.join(first, second)[:, :, None] >> place) & 0xFF
    of_x = (tl.join(x[0], x[1])[:, :, None] << (24 - place)) >> 24
    of_w, of_x = tl.reshape(of_w, (WARPS, 8, 1, 32)), tl.reshape(of_x, (WARPS, 1, 8, 32))
    return tl.split(tl.reshape(tl.sum(of_w * of_x, axis=3), (32 * WARPS, 2)))

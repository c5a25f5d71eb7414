"""Instructions that Triton does not expose, as inline PTX, and in plain Triton for the interpreter.

Tensors have one element per thread. There are four kinds of functions:

- shuffles, sums by them, the number of a warp, and loads of 16 bytes, which the compiler does not
  move before earlier operations, such as waiting for the kernel that writes the data;
- shared memory, and copies to it from global memory, per warp. `cp.async`, from compute capability
  8.0, copies without passing through registers: with ordinary loads, the data in flight would need
  more registers than there are, and the compiler would delay the loads. A warp starts copies,
  commits them as a group, and waits for all but its latest groups. Addresses are int32. Copies do
  not run in the interpreter; without `PTX`, addresses point to the launch's own global memory,
  which `memory_of` returns in place of shared memory;
- decoding of packed trits in registers;
- tensor-core products of these trits and bf16 x. The instruction `mma.m16n8k16` multiplies 16 rows
  of w by 8 rows of x over 16 columns. Thread 4 r + c of a warp supplies and receives

      w: eight bytes of rows r and r + 8; each of their five digits has eight weights of a plane
      x: for each digit, the eight elements of row r that these weights are multiplied by
      y: products of rows r and r + 8 of w with rows 2 c and 2 c + 1 of x

Columns of the instruction, and columns of a plane of 32 weights, by thread:

    instruction k     0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15      16 deep, of a thread
    thread c           0     1     2     3     0      1       2       3        four: 2 c, 2 c + 1,
                                                                               2 c + 8, 2 c + 9
    plane, thread c   8 c .. 8 c + 7: four of them for each of two instructions

Reason: a sum does not depend on the order of its terms. So the columns of w and x are permuted in
    the same way, and a thread multiplies the eight contiguous elements that it has loaded, without
    shuffles.
"""

from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton

HAS_PTX = not INTERPRETED
"""Whether kernels may contain PTX. The interpreter computes the same in plain Triton, slowly."""
_WARP = tl.constexpr("""{
.reg .b32 warp;
mov.u32 warp, %tid.x;
shr.u32 warp, warp, 5;
shfl.sync.idx.b32 $0, warp, 0, 0x1f, 0xffffffff;
}""")
_LOAD_CONSTANT = tl.constexpr("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_NEW = tl.constexpr("ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];")


@triton.constexpr_function
def _shuffle_xor_ptx(mask):
    return f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"


@triton.constexpr_function
def _load_where_ptx(cached):
    return f"""{{
.reg .pred p;
setp.ne.b32 p, $5, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@p ld.global{"" if cached else ".cg"}.v4.b32 {{$0, $1, $2, $3}}, [$4];
}}"""


@triton.jit
def shuffle_xor(value, MASK: tl.constexpr, PTX: tl.constexpr):
    """Fetch an int32 or float32 from the thread of the warp whose number differs by `MASK`."""
    if PTX:
        CODE: tl.constexpr = _shuffle_xor_ptx(MASK)
        REGISTERS: tl.constexpr = "=f,f" if value.dtype == tl.float32 else "=r,r"
        return tl.inline_asm_elementwise(
            CODE, REGISTERS, [value], dtype=value.dtype, is_pure=False, pack=1
        )
    return tl.gather(value, tl.arange(0, value.shape[0]) ^ MASK, 0)


@triton.jit
def sum_across(values, FROM: tl.constexpr, TO: tl.constexpr, PTX: tl.constexpr):
    """Sum each tensor of a tuple over the threads whose numbers differ in bits FROM to TO - 1.

    All of them have the same sum, to the last bit.
    """
    for bit in tl.static_range(5):
        if 1 << bit >= FROM and 1 << bit < TO:
            others, sums = (), ()
            for i in tl.static_range(len(values)):  # issue all before the first use
                others = others + (shuffle_xor(values[i], 1 << bit, PTX),)  # noqa: RUF005
            for i in tl.static_range(len(values)):
                sums = sums + (values[i] + others[i],)  # noqa: RUF005
            values = sums
    return values


@triton.jit
def warp_number():
    """Return the number of the warp, a scalar that differs by warp; PTX only.

    Warps of a program can branch on it, unlike on tensors. There must be no barrier in a branch.
    """
    return tl.inline_asm_elementwise(_WARP, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_words(pointer, mask):
    words, four = pointer.to(tl.pointer_type(tl.int32)), ()
    for i in tl.static_range(4):
        four = four + (tl.load(words + i, mask=mask, other=0),)  # noqa: RUF005
    return four


@triton.jit
def _load_four(pointer, CODE: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,l", [pointer.to(tl.int64)],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    return _load_words(pointer, tl.full(pointer.shape, 1, tl.int1))


@triton.jit
def load_constant(pointer, PTX: tl.constexpr):
    """Load four int32 that no kernel writes and that are needed once."""
    return _load_four(pointer, _LOAD_CONSTANT, PTX)


@triton.jit
def load_new(pointer, PTX: tl.constexpr):
    """Load four int32 that another kernel may just have written, past the L1 cache."""
    return _load_four(pointer, _LOAD_NEW, PTX)


@triton.jit
def load_where(pointer, mask, CACHED: tl.constexpr, PTX: tl.constexpr):
    """Load four int32 where `mask`, by way of the L1 cache if `CACHED`; elsewhere zeros."""
    if PTX:
        CODE: tl.constexpr = _load_where_ptx(CACHED)
        return tl.inline_asm_elementwise(
            CODE, "=&r,=&r,=&r,=&r,l,r", [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    return _load_words(pointer, mask)


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
      so the bf16 is 2 T. Then -3 q + T = 3 f' mod 4, from which an even digit starts.
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
        w_lanes, x_lanes = unpair(trits[i]), unpair(x[i])
        for j in tl.static_range(2):
            sums += _multiply_lanes(w_lanes[j], x_lanes[j])
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
    w_lanes = (tl.join(first, second)[:, :, None] >> place) & 0xFF
    x_lanes = (tl.join(x[0], x[1])[:, :, None] << (24 - place)) >> 24
    w_lanes, x_lanes = (
        tl.reshape(w_lanes, (WARPS, 8, 1, 32)),
        tl.reshape(x_lanes, (WARPS, 1, 8, 32)),
    )
    return tl.split(tl.reshape(tl.sum(w_lanes * x_lanes, axis=3), (32 * WARPS, 2)))


_COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, $1;")
_FENCE = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")
_WRITE = tl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, $1;")
_WRITE_WHERE = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $3, 0;
@p st.shared.b32 [$1], $2;
mov.b32 $0, $1;
}""")
_WRITE_TWO = tl.constexpr("st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, $1;")
_WRITE_FOUR = tl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, $1;")
_READ = tl.constexpr("ld.shared.b32 $0, [$1];")
_READ_FOUR = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_READ_FOUR_WHERE = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $5, 0;
@p ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];
}""")


@triton.constexpr_function
def _allocate_ptx(size):
    return f".shared .align 16 .b8 staged[{size}];\nmov.b32 $0, staged;"


@triton.constexpr_function
def _copy_ptx(cached):
    return f"""{{
.reg .pred p;
setp.ne.b32 p, $4, 0;
mov.b32 $0, 0;
@p cp.async.{"ca" if cached else "cg"}.shared.global [$1], [$2], 16, $3;
}}"""


@triton.constexpr_function
def _wait_ptx(latest):
    return f"cp.async.wait_group {latest}; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"


@triton.jit
def _execute(PTX: tl.constexpr, thread):
    tl.inline_asm_elementwise(PTX, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def allocate(SIZE: tl.constexpr):
    """Reserve up to 48 KB for a program, once in a kernel: the start address, a scalar.

    The compiler may compute a tensor again for another layout, with several elements per thread,
    and the memory must be declared only once: the address is a scalar.
    """
    PTX: tl.constexpr = _allocate_ptx(SIZE)
    return tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def memory_of(instead_ptr, thread, SIZE: tl.constexpr, PTX: tl.constexpr):
    """Reserve memory like `allocate`; return its start, the same in all threads.

    Args:
        instead_ptr: global memory without PTX, `SIZE` bytes for each program of the launch; unused
            with PTX.
        thread: indices of the threads.
        SIZE: size in bytes, a multiple of 16.
        PTX: whether to use PTX.
    """
    if PTX:
        start = allocate(SIZE)
    else:
        program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
        start = instead_ptr + program.to(tl.int64) * SIZE
    return start + tl.zeros_like(thread)


@triton.jit
def copy(target, source, there, some, CACHED: tl.constexpr):
    """Start copying 16 bytes per thread where `some`; write zeros where not `there`."""
    PTX: tl.constexpr = _copy_ptx(CACHED)
    tl.inline_asm_elementwise(
        PTX, "=r,r,l,r,r", [target, source, tl.where(there, 16, 0), some.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def commit(thread):
    """Commit the copies since the last commit as a group, for `wait_for_copies`."""
    _execute(_COMMIT, thread)


@triton.jit
def wait_for_copies(LATEST: tl.constexpr, thread):
    """Wait for all copies of the warp except those of its latest `LATEST` groups."""
    PTX: tl.constexpr = _wait_ptx(LATEST)
    _execute(PTX, thread)


@triton.jit
def wait_for_warp(thread):
    """Wait for all threads of the warp, so that what they have read can be overwritten."""
    _execute(_FENCE, thread)


@triton.jit
def _words(address, DTYPE: tl.constexpr):
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def write(address, value, PTX: tl.constexpr):
    """Write an int32 or float32."""
    if PTX:
        REGISTERS: tl.constexpr = "=r,r,f" if value.dtype == tl.float32 else "=r,r,r"
        tl.inline_asm_elementwise(
            _WRITE, REGISTERS, [address, value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(_words(address, value.dtype), value)


@triton.jit
def write_where(address, value, mask, PTX: tl.constexpr):
    """Write an int32 or float32 where `mask`."""
    if PTX:
        REGISTERS: tl.constexpr = "=r,r,f,r" if value.dtype == tl.float32 else "=r,r,r,r"
        tl.inline_asm_elementwise(
            _WRITE_WHERE, REGISTERS, [address, value, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(_words(address, value.dtype), value, mask=mask)


@triton.jit
def write_two(address, a, b, PTX: tl.constexpr):
    """Write two int32, side by side."""
    if PTX:
        tl.inline_asm_elementwise(
            _WRITE_TWO, "=r,r,r,r", [address, a, b], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(_words(address, tl.int32), a)
        tl.store(_words(address, tl.int32) + 1, b)


@triton.jit
def write_four(address, words, PTX: tl.constexpr = True):
    """Write four int32; other threads of the warp may read them after `wait_for_warp`."""
    if PTX:
        tl.inline_asm_elementwise(
            _WRITE_FOUR, "=r,r,r,r,r,r", [address, words[0], words[1], words[2], words[3]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for i in tl.static_range(4):
            tl.store(_words(address, tl.int32) + i, words[i])


@triton.jit
def read_float(address, PTX: tl.constexpr):
    """Read a float32."""
    if PTX:
        value = tl.inline_asm_elementwise(
            _READ, "=f,r", [address], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        value = tl.load(_words(address, tl.float32))
    return value


@triton.jit
def read_four(address, PTX: tl.constexpr = True):
    """Read four int32."""
    if PTX:
        four = tl.inline_asm_elementwise(
            _READ_FOUR, "=r,=r,=r,=r,r", [address], dtype=(tl.int32,) * 4, is_pure=False, pack=1
        )
    else:
        four = ()
        for i in tl.static_range(4):
            four = four + (tl.load(_words(address, tl.int32) + i),)  # noqa: RUF005
    return four


@triton.jit
def read_four_where(address, mask, old, PTX: tl.constexpr = True):
    """Read four int32 where `mask`; elsewhere keep those of `old`."""
    if PTX:
        four = tl.inline_asm_elementwise(
            _READ_FOUR_WHERE, "=r,=r,=r,=r,r,r,0,1,2,3",
            [address, mask.to(tl.int32), old[0], old[1], old[2], old[3]],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        four = ()
        for i in tl.static_range(4):
            word = tl.load(_words(address, tl.int32) + i, mask=mask, other=0)
            four = four + (tl.where(mask, word, old[i]),)  # noqa: RUF005
    return four

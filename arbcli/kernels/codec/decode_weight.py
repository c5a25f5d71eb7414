"""Decode packed trits and scales to weights: w[n, k] = bf16(T[n, k] * 2 ** (v[n, g] / 128)).

v = 128 E + F is the fixed-point log2 of the scale of group g = k // G: E the octave, F the
fraction. The rounded bf16 value is the weight, in every kernel, backend and reference. It is built
from integers: E is the exponent field of a float, F selects one of 128 mantissas, all at least
0.005 of a bf16 step away from a rounding boundary, so all implementations of exp2 round to the same
one.

If each plane of a block lies within one group, a warp decodes eight blocks at a time:

    thread c of four    loads bytes 8 c .. 8 c + 7 of a block: eight neighbours of each plane
    shared memory       has plane j of block b of thread c at 320 b + 64 j + 16 c, eight bf16
    the warp stores     five times 512 contiguous bytes of this, 16 bytes per thread

Reason: one instruction multiplies two trits by their scale, which gives the stored pair of bf16,
    and threads do not exchange trits. Four threads hold 64 contiguous bytes of a plane; through
    shared memory a warp stores 512 bytes at once, as fast as writing zeros. The short last block,
    or the whole matrix if groups do not contain whole planes, is decoded by columns, one weight at
    a time.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits, decode_digits_triton
from arbcli.kernels.codec.layout import BLOCK, PLANE
from arbcli.kernels.codec.packed import Packed, load_scale
from arbcli.kernels.codec.packing import has_planes, positions_in_block, trit_at
from arbcli.kernels.runtime import ptx
from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL
from arbcli.kernels.runtime.backend import LARGE_ELEMENTS
from arbcli.kernels.runtime.operation import Operation, tl, triton

ABREAST, COLUMN_ROWS = 4, 16
"""Blocks of one row among the eight that a warp decodes at once; rows per program by columns."""
NARROW, NARROW_TILE = 12, (1, 32)
"""Maximum blocks per row of small matrices with this tile instead, which has fewer programs."""


@triton.jit
def _decode_weight_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, weight_ptr,
    N, K,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, BY_BLOCK: tl.constexpr,
    ABREAST: tl.constexpr, COLUMN_ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Decode 32 columns of a block of rows, or, with `BY_BLOCK`, 32 full blocks."""
    program = tl.program_id(0)
    blocks = K // 160 if BY_BLOCK else 0
    chunks = tl.cdiv(K - 160 * blocks, 32)
    column_programs = tl.cdiv(N, COLUMN_ROWS) * chunks
    if program < column_programs:
        _decode_columns(
            packed_ptr, exponent_ptr, fraction_ptr, weight_ptr,
            program // chunks * COLUMN_ROWS, 160 * blocks + program % chunks * 32, N, K,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_wn,
            GROUP, HAS_FRACTION, COLUMN_ROWS,
        )  # fmt: skip
    elif BY_BLOCK:
        tiles, program = tl.cdiv(blocks, 4 * ABREAST), program - column_programs
        _decode_blocks(
            packed_ptr, exponent_ptr, fraction_ptr, weight_ptr,
            program // tiles * (8 // ABREAST), program % tiles * (4 * ABREAST), N, blocks,
            stride_pn, stride_en, stride_eg, stride_fn, stride_fg, stride_wn,
            GROUP, HAS_FRACTION, ABREAST, PTX,
        )  # fmt: skip


@triton.jit
def _decode_columns(
    packed_ptr, exponent_ptr, fraction_ptr, weight_ptr, first_n, first, N, K,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Decode up to 32 weights of each row, from column `first` on, a multiple of 32."""
    row = first_n.to(tl.int64)
    n = tl.minimum(tl.arange(0, ROWS), N - 1 - first_n)[None, :]  # rows beyond N repeat the last
    columns = first + tl.arange(0, 32)[:, None]  # first axis: threads have contiguous weights
    k = tl.minimum(columns, K - 1)
    block = first // 160
    offs_byte, factor = positions_in_block(block, k - 160 * block, K)
    byte = tl.load(packed_ptr + row * stride_pn + (n * stride_pn + offs_byte * stride_pb))
    scale = load_scale(
        exponent_ptr + row * stride_en, fraction_ptr + row * stride_fn,
        n, (first if GROUP % 32 == 0 else k) // GROUP, True,
        stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
    )  # fmt: skip
    weight = (trit_at(byte, factor) * scale).to(weight_ptr.dtype.element_ty)
    weight_ptrs = weight_ptr + row * stride_wn + (n * stride_wn + columns)
    tl.store(weight_ptrs, weight, mask=columns < K)


@triton.jit
def _decode_blocks(
    packed_ptr, exponent_ptr, fraction_ptr, weight_ptr, first_n, first_block, N, blocks,
    stride_pn, stride_en, stride_eg, stride_fn, stride_fg, stride_wn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, ABREAST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Decode full blocks of rows with one warp; tensors have one element per thread.

    Thread c of four decodes bytes 8 c .. 8 c + 7 of a block, which are eight neighbours in each of
    the five planes, and then those of three more blocks. It builds the scales of the c-th of these
    four blocks, and the other threads fetch them from it.
    """
    thread = tl.arange(0, 32)
    c, lane = thread % 4, thread // 4 % ABREAST
    block, n = first_block + lane, first_n + thread // (4 * ABREAST)
    mine = tl.where(n < N, blocks - block, 0)  # blocks from this thread's to the row's end
    n = n.to(tl.int64)
    # the five scales of the c-th block of four, as pairs of bf16
    scales = ()
    for digit in tl.static_range(5):
        scale = load_scale(
            exponent_ptr + n * stride_en, fraction_ptr + n * stride_fn,
            0, (5 * (block + ABREAST * c) + digit) // (GROUP // 32), mine > ABREAST * c,
            0, stride_eg, 0, stride_fg, HAS_FRACTION,
        )  # fmt: skip
        scale *= 0.5 if digit % 2 else -0.5  # as `take_digits` gives 2 T or -2 T
        scales = scales + (ptx.pair(scale, scale),)  # noqa: RUF005
    start = packed_ptr + n * stride_pn
    skew = start.to(tl.int64).to(tl.int32) & 3  # rows are not aligned
    words = (start - skew).to(tl.pointer_type(tl.int32)) + (8 * block + 2 * c)
    # eight bytes of each of four blocks, all loaded before the first is decoded
    loaded = ()
    for i in tl.static_range(4):
        some = mine > ABREAST * i
        for j in tl.static_range(3):
            here = some & (skew > 0) if j == 2 else some
            loaded = loaded + (tl.load(words + (8 * ABREAST * i + j), mask=here),)  # noqa: RUF005

    STAGED: tl.constexpr = PTX and weight_ptr.dtype.element_ty == tl.bfloat16
    at = ptx.allocate(2560) + tl.zeros_like(thread) if STAGED else thread
    weights = weight_ptr + n * stride_wn + (160 * block + 8 * c)
    for i in tl.static_range(4):
        low = ptx.shift_pair(loaded[3 * i], loaded[3 * i + 1], 8 * skew, PTX)
        high = ptx.shift_pair(loaded[3 * i + 1], loaded[3 * i + 2], 8 * skew, PTX)
        # the five trits of each byte, from the last digit on
        qs = ptx.spread(low, PTX) + ptx.spread(high, PTX)
        lane = tl.full(c.shape, i, tl.int32)
        for digit in tl.static_range(4, -1, -1):
            trits, qs = ptx.take_digits(qs, digit, PTX)
            scale = ptx.read_lane(scales[digit], lane, PTX)
            pairs = ()
            for j in tl.static_range(4):
                pairs = pairs + (ptx.multiply_pairs(trits[j], scale, PTX),)  # noqa: RUF005
            if STAGED:
                ptx.write_four(at + (80 * (thread - c) + 64 * digit + 16 * c), pairs)
            else:
                _store_eight(weights + (160 * ABREAST * i + 32 * digit), pairs, mine > ABREAST * i)
        if STAGED:  # 512 bytes of a row at once, by way of shared memory
            _store_staged(
                at, weight_ptr, first_n, first_block + ABREAST * i, N, blocks, stride_wn, ABREAST
            )


@triton.jit
def _store_staged(
    at, weight_ptr, first_n, first_block, N, blocks, stride_wn, ABREAST: tl.constexpr
):
    """Store eight blocks from shared memory, 512 contiguous bytes at a time."""
    thread = tl.arange(0, 32)
    ptx.wait_for_warp(thread)
    for part in tl.static_range(5):
        eight = 32 * part + thread  # index of the first of eight weights; a block has 20 eights
        four = ptx.read_four(at + 16 * eight)
        n, eight = first_n + eight // (20 * ABREAST), eight % (20 * ABREAST)
        pointer = weight_ptr + n.to(tl.int64) * stride_wn + (160 * first_block + 8 * eight)
        _store_four(pointer, four, (n < N) & (first_block + eight // 20 < blocks))
    ptx.wait_for_warp(thread)


@triton.jit
def _store_eight(pointer, pairs, mask):
    """Store eight weights per thread, four pairs of bf16, to an address aligned to 16 bytes."""
    if pointer.dtype.element_ty == tl.float32:
        _store_four(pointer, ptx.unpair(pairs[0]) + ptx.unpair(pairs[1]), mask)
        _store_four(pointer + 4, ptx.unpair(pairs[2]) + ptx.unpair(pairs[3]), mask)
    else:
        _store_four(pointer, pairs, mask)


@triton.jit
def _store_four(pointer, words, mask):
    four = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    pointers = pointer.to(tl.pointer_type(words[0].dtype))[:, None] + tl.arange(0, 4)[None, :]
    four = tl.reshape(four, pointers.shape)
    tl.store(tl.multiple_of(pointers, (1, 16)), four, mask=mask[:, None])


def _has_wide_loads(packed: Packed) -> bool:
    """Return whether planes have one scale, and words and eight weights can be accessed at once."""
    whole = has_planes(packed.group_size) and packed.in_features % 8 == 0
    return whole and packed.trits.stride(1) == 1 and torch.version.hip is None


def decode_weight_triton(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode weights with the kernel for trits or the one for int8 weights."""
    if packed.remainder is not None:
        return decode_digits_triton(packed, dtype)
    rows, in_features = packed.out_features, packed.in_features
    weight = torch.empty(rows, in_features, dtype=dtype, device=packed.trits.device)
    if weight.numel():
        wide = _has_wide_loads(packed)
        blocks = in_features // BLOCK if wide else 0
        narrow = wide and blocks <= NARROW and weight.numel() < LARGE_ELEMENTS
        abreast, column_rows = NARROW_TILE if narrow else (ABREAST, COLUMN_ROWS)
        chunks = triton.cdiv(in_features - BLOCK * blocks, PLANE)
        programs = triton.cdiv(rows, column_rows) * chunks
        programs += triton.cdiv(rows, 8 // abreast) * triton.cdiv(blocks, 4 * abreast)
        _decode_weight_kernel[(programs,)](
            *packed.pointers, weight, rows, in_features, *packed.strides, weight.stride(0),
            **packed.constants, BY_BLOCK=wide, ABREAST=abreast, COLUMN_ROWS=column_rows,
            PTX=ptx.HAS_PTX and wide, num_warps=1,
        )  # fmt: skip
    return weight


decode_weight = Operation(
    "decode_weight", decode_weight_triton, decode_digits,
    "packed: packed[N, K]; dtype",
    where=(DTYPE_IS_REAL,),
)  # fmt: skip
"""Decode a packed matrix to its weights.

Args:
    packed: N rows by K weights.
    dtype: bfloat16, or float32 with the same bf16 values.

Returns:
    (N, K) in `dtype`; exact, and bitwise equal on every backend.
"""

"""Decode packed trits and scales to e4m3, for products in eight bits: w ~ q * scale.

scale is one power of two for the matrix. It moves the largest octave to 2**7, as in
`quantise_rows`, or to 2**6 for int8 weights, which are up to three times their scale.
Scales of groups, or int8 weights, are rounded to the three mantissa bits of e4m3, an error
of at most 6 %, identically in the forward and backward pass. Training steps update the exact
digits.

A thread decodes four trits of each plane, which are contiguous in q, to one int32:

    as it is      bytes j .. j + 3 of row n       to q[n, k .. k + 3], k the column of byte j
    transposed    byte j of rows n .. n + 3       to q[k, n .. n + 3]

Reason: a trit times an e4m3 number is that number, its negative or 0. So three integer operations
    on an int32 multiply four weights without conversion to float, and one store writes all four.
    Only short blocks, and groups that do not contain whole planes, are stored one byte at a time.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits_torch, decode_tile, to_e4m3
from arbcli.kernels.codec.layout import BLOCK
from arbcli.kernels.codec.packed import Packed, scale_of
from arbcli.kernels.codec.packing import byte_tiles, has_planes, plane_offsets
from arbcli.kernels.matmul.quantise_rows import E4M3, LARGEST_OCTAVE, has_e4m3
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import Matrix, Number
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.runtime.ptx import first_digits, take_digits

MOST_PARTS = 128
"""Maximum number of programs that search for the largest exponent."""
PART = 8192
"""Exponents that a program reads at a time."""
TILE, TRANSPOSED_TILE = (4, 8, 4), (32, 2, 4)
"""Rows, blocks of each, and warps of a program that decodes int8 weights."""


def _decode_e4m3_torch(packed: Packed, transposed: bool = False) -> tuple[Tensor, Tensor]:
    octave = packed.exponent.amax().to(torch.int32) - _largest_octave(packed)
    inverse, scale = (((127 + sign * octave) << 23).view(torch.float32) for sign in (-1, 1))
    q = (decode_digits_torch(packed, torch.float32) * inverse).to(E4M3)
    q = q.T.contiguous() if transposed else q
    return q, scale.repeat(1, len(q))


def _largest_octave(packed: Packed) -> int:
    return LARGEST_OCTAVE - (packed.remainder is not None)


@triton.jit
def _largest_kernel(exponent_ptr, largest_ptr, number, program_size, BLOCK: tl.constexpr):
    """Compute the maximum of `program_size` exponents per program, a multiple of BLOCK."""
    begin = tl.program_id(0) * program_size
    largest = tl.full((BLOCK,), -128, tl.int32)
    for start in range(begin, begin + program_size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        exponent = tl.load(exponent_ptr + offs, mask=offs < number, other=-128)
        largest = tl.maximum(largest, exponent.to(tl.int32))
    tl.store(largest_ptr + tl.program_id(0), tl.max(largest, axis=0).to(tl.int8))


@triton.jit
def _load_largest(largest_ptr, PARTS: tl.constexpr):
    """Load the largest exponents of all parts, and return their maximum."""
    return tl.max(tl.load(largest_ptr + tl.arange(0, PARTS)).to(tl.int32), axis=0)


@triton.jit
def _decode_int8_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, largest_ptr, q_ptr, scale_ptr,
    N, K, blocks, num_scales,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit,
    stride_qn, stride_qk,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr, NIBBLE: tl.constexpr,
    ROWS: tl.constexpr, ABREAST: tl.constexpr, REST_ROWS: tl.constexpr, SHARE: tl.constexpr,
    PARTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Decode a tile of int8 weights; each program stores `SHARE` of the equal scales."""
    octave = _load_largest(largest_ptr, PARTS) - 6
    inverse = ((127 - octave) << 23).to(tl.float32, bitcast=True)
    decode_tile(
        packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, q_ptr, N, K, blocks,
        stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
        stride_an, stride_ak, trit_unit, low_unit, stride_qn, stride_qk, inverse,
        GROUP, HAS_FRACTION, INT8, NIBBLE, ROWS, ABREAST, REST_ROWS, False, True, NATIVE,
    )  # fmt: skip
    power = ((127 + octave) << 23).to(tl.float32, bitcast=True)
    row = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    tl.store(scale_ptr + row, tl.zeros(row.shape, tl.float32) + power, mask=row < num_scales)


def _decode_int8_triton(packed: Packed, transposed: bool) -> tuple[Tensor, Tensor]:
    rows, in_features = packed.out_features, packed.in_features
    shape = (in_features, rows) if transposed else (rows, in_features)
    q = torch.empty(shape, dtype=E4M3, device=packed.trits.device)
    scale = torch.empty(1, len(q), device=packed.trits.device)
    strides = q.stride()[::-1] if transposed else q.stride()
    largest = _largest_exponents(packed)
    tile_rows, abreast, warps = TRANSPOSED_TILE if transposed else TILE
    blocks = in_features // BLOCK if has_planes(packed.group_size) else 0
    programs = triton.cdiv(rows, tile_rows) * (
        triton.cdiv(in_features, BLOCK) - blocks + triton.cdiv(blocks, abreast)
    )
    _decode_int8_kernel[(programs,)](
        *packed.all_pointers, largest, q.view(torch.uint8), scale,
        rows, in_features, blocks, len(q), *packed.all_strides, *packed.worths, *strides,
        **packed.all_constants, ROWS=tile_rows, ABREAST=abreast, REST_ROWS=tile_rows,
        SHARE=triton.next_power_of_2(triton.cdiv(len(q), programs)), PARTS=largest.numel(),
        NATIVE=has_e4m3(q), num_warps=warps,
    )  # fmt: skip
    return q, scale


@triton.jit
def _spread(word):
    """Start decoding four bytes as in `ptx`: two int32, of bytes 0, 2 and of 1, 3."""
    return first_digits(word & 0xFF00FF), first_digits((word >> 8) & 0xFF00FF)


@triton.jit
def _times(even, odd, scales, digit: tl.constexpr):
    """Multiply four positive e4m3 numbers by the trits that `take_digits` read from four bytes.

    A trit is 0 or +-1, so this only masks a number and sets its sign.
    """
    # the top two bits of each of four bytes: 00 is 0, 01 is 1 and 11 is -1; even digits are negated
    trits = (even.to(tl.uint32, bitcast=True) >> 8) | odd.to(tl.uint32, bitcast=True)
    trits = trits.to(tl.int32, bitcast=True)
    nonzero = ((trits >> 6) & 0x01010101) * 0xFF
    SIGN_OF_1: tl.constexpr = 0x40404040 if digit % 2 else -0x3F3F3F40  # 01 or 11, four times
    return ((scales ^ SIGN_OF_1) & nonzero) ^ trits


@triton.jit
def _decode_e4m3_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, largest_ptr, q_ptr, scale_ptr,
    N, K, row_bytes,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_q,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Decode one block of rows; neighbouring programs write neighbouring parts of q."""
    program, blocks, tiles = tl.program_id(0), tl.cdiv(row_bytes, 32), tl.cdiv(N, BLOCK_N)
    if TRANSPOSED:
        block, tile = (
            blocks - 1 - program // tiles,
            program % tiles,
        )  # the short block first, as it takes longest
    else:
        block, tile = program % blocks, program // blocks
    n, b, group = (tile * BLOCK_N).to(tl.int64), block * 32, block * 160 // GROUP
    packed_ptr += n * stride_pn + b.to(tl.int64) * stride_pb
    exponent_ptr += n * stride_en + group.to(tl.int64) * stride_eg
    fraction_ptr += n * stride_fn + group.to(tl.int64) * stride_fg
    q_ptr += n if TRANSPOSED else n * stride_q
    rows = tl.minimum(N - n, BLOCK_N).to(tl.int32)
    octave = _load_largest(largest_ptr, PARTS) - 7
    if (GROUP % 32 == 0) & (block * 160 + 160 <= K) & (stride_q % 4 == 0):
        _decode_block(
            packed_ptr, exponent_ptr, fraction_ptr, octave, q_ptr, rows, block, K, row_bytes,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_q,
            GROUP, HAS_FRACTION, TRANSPOSED, GROUPS, BLOCK_N, True,
        )  # fmt: skip
    else:
        _decode_block(
            packed_ptr, exponent_ptr, fraction_ptr, octave, q_ptr, rows, block, K, row_bytes,
            stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_q,
            GROUP, HAS_FRACTION, TRANSPOSED, GROUPS, BLOCK_N, False,
        )  # fmt: skip
    if TRANSPOSED:
        row, end, once = block * 160 + tl.arange(0, 256), block * 160 + 160, tile == 0
    else:
        row, end, once = n + tl.arange(0, BLOCK_N), N, block == 0
    if once:
        scale = ((127 + octave) << 23).to(tl.float32, bitcast=True)
        mask = row < tl.minimum(end, K if TRANSPOSED else N)
        tl.store(scale_ptr + row, tl.zeros(row.shape, tl.float32) + scale, mask=mask)


@triton.jit
def _decode_block(
    packed_ptr, exponent_ptr, fraction_ptr, octave, q_ptr, rows, block, K, row_bytes,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg, stride_q,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Decode a block of rows, four neighbours in q at a time, as one int32.

    If `TRANSPOSED`, these come from the same byte of four rows, else from four bytes of one row.
    Tensors are [8, rows], so that a warp reads from few rows at once. With `PLANES` the block is
    full, each plane lies within one group, and whole int32 are stored.
    """
    PARTS: tl.constexpr = 4 if TRANSPOSED else 1  # interleaved sets of bytes; rows of an int32
    offs_w = tl.arange(0, BLOCK_N // PARTS)[None, :]
    n, j = PARTS * offs_w, 4 * tl.arange(0, 8)[:, None]
    # load four bytes to each word, and start decoding them
    left = ()
    for part in tl.static_range(PARTS):
        word = tl.zeros((j + n).shape, tl.int32)
        for i in tl.static_range(4):
            n_i, j_i = (n + i, j + part) if TRANSPOSED else (n, j + i)
            j_i = j_i if PLANES else tl.minimum(j_i, row_bytes - block * 32 - 1)
            byte = tl.load(packed_ptr + tl.minimum(n_i, rows - 1) * stride_pn + j_i * stride_pb)
            word |= byte.to(tl.int32) << 8 * i
        left = left + _spread(word)

    # the scales of all groups of the block, rounded to e4m3, one byte for each row of a word
    first_group = block * 160 // GROUP
    group = tl.minimum(tl.arange(0, GROUPS)[:, None], tl.cdiv(K, GROUP) - 1 - first_group)
    inverse = ((127 - octave) << 23).to(tl.float32, bitcast=True)
    scales = tl.zeros((group + n).shape, tl.int32)
    for i in tl.static_range(PARTS):
        n_i = tl.minimum(n + i, rows - 1)
        exponent = tl.load(exponent_ptr + n_i * stride_en + group * stride_eg)
        fraction = tl.zeros_like(exponent)
        if HAS_FRACTION:
            fraction = tl.load(fraction_ptr + n_i * stride_fn + group * stride_fg)
        # integer arithmetic, as triton 3.6 converts a column of scales incorrectly
        scale = to_e4m3(scale_of(exponent, fraction) * inverse, False)
        scales |= scale.to(tl.int32) << 8 * i
    if not TRANSPOSED:
        scales *= 0x01010101

    first_k = block * 160
    if TRANSPOSED:
        four_ptr = (q_ptr + first_k.to(tl.int64) * stride_q).to(tl.pointer_type(tl.int32))
        four_ptrs = four_ptr + j * (stride_q // 4) + offs_w
    else:
        four_ptrs = q_ptr + first_k + (n * stride_q + j)
    # decode one plane after another, multiply by scales, and store
    for digit in tl.static_range(4, -1, -1):
        trits, left = take_digits(left, digit, False)
        if PLANES:
            if 160 % GROUP == 0:
                plane_scales = tl.zeros_like(n) + 32 * digit // GROUP
            else:
                plane_scales = tl.zeros_like(n) + (first_k + 32 * digit) // GROUP - first_group
            plane_scales = tl.gather(scales, plane_scales, 0)
        for part in tl.static_range(PARTS):
            even, odd = trits[2 * part], trits[2 * part + 1]
            if PLANES:
                q = _times(even, odd, plane_scales, digit)
                if TRANSPOSED:
                    q_ptrs = four_ptrs + (32 * digit + part) * (stride_q // 4)
                else:
                    q_ptrs = (four_ptrs + 32 * digit).to(tl.pointer_type(tl.int32))
                tl.store(q_ptrs, q, mask=n < rows)
            else:
                for i in tl.static_range(4):
                    if i == 0 or not TRANSPOSED:
                        k = plane_offsets(block * 32 + j + part + i, K, digit)
                        stores_k = tl.minimum(k // GROUP - first_group, GROUPS - 1)
                        stores_k = tl.gather(scales, tl.zeros_like(n) + stores_k, 0)
                        four = _times(even, odd, stores_k, digit)
                    n_i = n + i if TRANSPOSED else n
                    at = k.to(tl.int64) * stride_q + n_i if TRANSPOSED else n_i * stride_q + k
                    q = (four >> 8 * i).to(tl.uint8)
                    tl.store(q_ptr + at, q, mask=(k < K) & (n_i < rows))


def _decode_e4m3_triton(packed: Packed, transposed: bool = False) -> tuple[Tensor, Tensor]:
    if packed.remainder is not None:
        return _decode_int8_triton(packed, transposed)
    (rows, num_bytes), in_features = packed.trits.shape, packed.in_features
    shape = (in_features, rows) if transposed else (rows, in_features)
    q = torch.empty(shape, dtype=E4M3, device=packed.trits.device)
    scale = torch.empty(1, len(q), device=packed.trits.device)
    block_n, warps = (128, 4) if transposed else (8, 1)  # the fastest on an H200
    # the maximum number of groups that a block overlaps, at least 8
    groups = max(8, triton.next_power_of_2((BLOCK - 1) // packed.group_size + 2))
    tiles, blocks = byte_tiles(rows, num_bytes, block_n)
    largest = _largest_exponents(packed)
    _decode_e4m3_kernel[(tiles * blocks,)](
        *packed.pointers, largest, q.view(torch.uint8), scale,
        rows, in_features, num_bytes, *packed.strides, shape[1],
        **packed.constants, TRANSPOSED=transposed,
        GROUPS=groups, BLOCK_N=block_n, PARTS=largest.numel(),
        num_warps=warps if groups == 8 else 4,
    )  # fmt: skip
    return q, scale


def _largest_exponents(packed: Packed) -> Tensor:
    """Compute the maximum exponent of each part of a matrix, int8, in one or more parts."""
    exponent = packed.exponent.contiguous()
    number = exponent.numel()
    parts = min(triton.next_power_of_2(triton.cdiv(number, PART)), MOST_PARTS)
    largest = torch.empty(parts, dtype=torch.int8, device=exponent.device)
    program_size = triton.cdiv(number, parts * PART) * PART
    _largest_kernel[(parts,)](exponent, largest, number, program_size, BLOCK=PART, num_warps=8)
    return largest


decode_e4m3 = Operation(
    "decode_e4m3", _decode_e4m3_triton, _decode_e4m3_torch,
    {"packed": Matrix(), "transposed": Number()},
)  # fmt: skip
"""Decode a packed matrix to e4m3.

Args:
    packed: N rows by K weights, not empty.
    transposed: whether to decode w.T.

Returns:
    (N, K) float8_e4m3fn q, or (K, N) if `transposed`, contiguous; and its scale, a power of two,
    repeated for every row of q: (1, N) or (1, K) float32, as scaled matrix products expect.
"""

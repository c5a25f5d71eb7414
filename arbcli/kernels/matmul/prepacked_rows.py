"""Batch-invariant products of up to 64 rows: y = added + gate(norm(x) @ w.T).

Norm, gate and sum are those of `row_matmul`; `prepacked` describes the layout of w. The bits of a
row of the result do not depend on the other rows or their number, so a text is the same whether it
is generated alone or in a batch. To this end, the order of every sum depends only on the shape of
w: a warp takes every `warps`-th block of columns, and warps are summed in order.

Decoding. A code T + 1, shifted to the top of 16 bits and with all bits flipped, is the bf16 number
2 T once the other bits are cleared: 00 becomes 11, -2; 01 becomes 10, -0; and 10 becomes 01, 2. Its
product with its scale is exact. The factor 2 is removed from the sums.

Shared memory, of a program with W warps and S pieces of each of its tiles and warps:

    warp 0                          warp 1               warp W - 1       squares
    | tile 0: S x 640 | tile 1 | .. | tile 0 | ..   ...  | ..         |   W x rows of x, float32 |
      later its sums: 512 bytes an octet of rows, 16 a thread

Reason: a warp copies and waits for its own pieces only, without barriers. Copies do not pass
    through registers, which hold the sums of all rows of x. Sums replace the pieces that were
    multiplied; after one barrier, warps add the sums of all warps in order.

Work. A program computes several tiles of 16 rows. It starts the copies of their pieces to shared
memory, as many as fit, before it waits for the kernel that computes x. Thread 4 r + c of a warp has
columns 8 c .. 8 c + 7 of each plane, of rows r and r + 8 of w and of row r of x. The matrix
instruction has columns for eight rows of x; for sixteen it is repeated with the same trits. A warp
with at most two blocks of columns keeps its x in registers for all tiles. The squares of the norm
are the diagonal of the product of x with itself.
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import round_weight
from arbcli.kernels.matmul.prepacked import (
    BLOCK,
    CODE_BYTES,
    PIECE_BYTES,
    PREPACKED_SCHEMA,
    Prepacked,
    prepacked_native,
    prepacked_torch,
)
from arbcli.kernels.matmul.swizzled import few_rows_fit, store_both
from arbcli.kernels.runtime.backend import num_processors
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.ptx import (
    HAS_PTX,
    add_products,
    commit,
    copy,
    load_where,
    memory_of,
    multiply_pairs,
    pair,
    read_float,
    read_four,
    unpair,
    wait_for_copies,
    wait_for_warp,
    write_four,
    write_where,
)

MAX_TEXTS = 64
"""Largest M."""
SHARED_BYTES = 47 << 10
"""Shared memory for pieces per program, in bytes."""
UNIT_BYTES = tl.constexpr(512)
"""Bytes of a warp's accumulator of 16 rows of w by 8 rows of x: four float32 per thread."""
INT8_BYTES = 2048 + 128
"""Bytes of a block of int8 weights with their scales."""
_SCALES_AT = tl.constexpr(CODE_BYTES)
_OFFSET = tl.constexpr("""{
.reg .b32 factor, zero;
mov.b32 factor, 0xC300C300;  // -128
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 $0, $1, factor, zero;
}""")
_WEIGHTS = tl.constexpr("""{
.reg .b32 bits, sign;
and.b32 bits, $2, 0x7F7F7F7F;
prmt.b32 $0, bits, 0x43, 0x4140;  // 128 + magnitude
prmt.b32 $1, bits, 0x43, 0x4342;
fma.rn.bf16x2 $0, $0, $3, $4;
fma.rn.bf16x2 $1, $1, $3, $4;
prmt.b32 sign, $2, 0, 0x1404;
lop3.b32 $0, $0, sign, 0x80008000, 0xF8;  // a | (b & c)
prmt.b32 sign, $2, 0, 0x3424;
lop3.b32 $1, $1, sign, 0x80008000, 0xF8;
}""")
_TWICE = tl.constexpr("prmt.b32 $0, $1, 0, 0x1010;")
_TWICE_UPPER = tl.constexpr("prmt.b32 $0, $1, 0, 0x3232;")


@triton.jit
def _twice(word, UPPER: tl.constexpr, PTX: tl.constexpr):
    """Copy the lower or the upper half of a word to both halves."""
    if PTX:
        CODE: tl.constexpr = _TWICE_UPPER if UPPER else _TWICE
        pair = tl.inline_asm_elementwise(CODE, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    elif UPPER:
        pair = ((word >> 16) & 0xFFFF) | (word & -0x10000)
    else:
        pair = (word & 0xFFFF) | (word << 16)
    return pair


@triton.jit
def _pair_of_scales(scale, PTX: tl.constexpr):
    """Return a word with a scale, as bf16 bits, in both halves, and one with -128 times it."""
    both = scale | (scale << 16)
    if PTX:
        return both, tl.inline_asm_elementwise(
            _OFFSET, "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1
        )
    return both, both


@triton.jit
def _weights(word, scale, offset, PTX: tl.constexpr):
    """Decode four bytes and multiply by their scale: two pairs of bf16."""
    if PTX:
        return tl.inline_asm_elementwise(
            _WEIGHTS, "=&r,=&r,r,r,r", [word, scale, offset],
            dtype=(tl.int32,) * 2, is_pure=True, pack=1,
        )  # fmt: skip
    row_scale, _ = unpair(scale)
    a, b = _weight(word, row_scale), _weight(word >> 8, row_scale)
    c, d = _weight(word >> 16, row_scale), _weight(word >> 24, row_scale)
    return pair(a, b), pair(c, d)


@triton.jit
def _weight(code, scale):
    magnitude = round_weight((code & 0x7F).to(tl.float32) * scale, 1)
    return tl.where((code & 0x80) == 0, magnitude, -magnitude)


@triton.jit
def _copy_block(
    block, slot, HEIGHT: tl.constexpr, pieces_ptr, scales_ptr, first_tile, tiles,
    BLOCKS: tl.constexpr, PLANES: tl.constexpr, OF_TILE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Start copying a warp's block of each tile to shared memory; zeros beyond the last block."""
    UNITS: tl.constexpr = PIECE_BYTES // 16
    lane = tl.arange(0, block.shape[0]) % 32
    for i in tl.static_range(HEIGHT):
        tile = tl.minimum(first_tile + i, tiles - 1)
        target = slot + (OF_TILE * i + 16 * lane)
        if INT8:  # four planes, which a matrix may have fewer of, and then their scales
            first, left = tile * PLANES + 4 * block, PLANES - 4 * block
            for plane in tl.static_range(4):
                source = (pieces_ptr + (64 * (first + plane) + 2 * lane)).to(tl.int64)
                copy(target + 512 * plane, source, plane < left, lane >= 0, False)
            source = (scales_ptr + (4 * first + 2 * lane)).to(tl.int64)
            copy(target + 2048, source, lane // 2 < left, lane < 8, False)
        else:
            # a piece of trits has its scales after its codes, and is copied as a whole
            piece = tile * BLOCKS + tl.minimum(block, BLOCKS - 1)
            source = (pieces_ptr + (PIECE_BYTES // 8 * piece + 2 * lane)).to(tl.int64)
            for j in tl.static_range(0, UNITS, 32):
                copy(target + 16 * j, source + 16 * j, block < BLOCKS, lane + j < UNITS, False)


@triton.jit
def _load_block(x_starts, block, K, PTX: tl.constexpr):
    """Load a warp's block of x: eight elements per thread for each plane and eight rows."""
    c, planes = tl.arange(0, block.shape[0]) % 4, ()
    for plane in tl.static_range(4):  # zeros beyond K, so the weights there do not matter
        k, octets = 128 * block + 32 * plane + 8 * c, ()
        for t in tl.static_range(len(x_starts)):
            octets = octets + (load_where(x_starts[t] + k // 4, k < K, True, PTX),)  # noqa: RUF005
        planes = planes + (octets,)  # noqa: RUF005
    return planes


@triton.jit
def _add_block(
    sums, slot, pieces_ptr, scales_ptr, tile, block, x,
    BLOCKS: tl.constexpr, PLANES: tl.constexpr, INT8: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of a warp's block of a tile and its block of x.

    Weights are in shared memory at `slot`; without PTX they are read from global memory.
    """
    if INT8:
        sums = _add_int8(sums, slot, pieces_ptr, scales_ptr, tile, block, x, PLANES, PTX)
    else:
        at = slot
        if not PTX:
            piece = tile * BLOCKS + tl.minimum(block, BLOCKS - 1)
            at = pieces_ptr.to(tl.pointer_type(tl.uint8)) + PIECE_BYTES * piece
        sums = _add_trits(sums, at, x, PTX)
    return sums


@triton.jit
def _add_trits(sums, at, x, PTX: tl.constexpr):
    """Add the products of the piece of trits at address `at` and a block of x."""
    thread = tl.arange(0, sums[0][0].shape[0])
    r, c = thread // 4 % 8, thread % 4
    codes = read_four(at + (128 * c + 16 * r), PTX)
    scales = read_four(at + (_SCALES_AT + 16 * r), PTX)
    for plane in tl.static_range(4):
        # decode 16 trits of a thread to eight pairs of bf16, 2 T times their scale
        pairs = ()
        for half in tl.static_range(2):
            scale = _twice(scales[2 * half + plane // 2], plane % 2 == 1, PTX)
            for i in tl.static_range(4):  # every second byte of a word makes a pair
                shifted = codes[2 * (i // 2) + half] << ((6 if i % 2 else 14) - 2 * plane)
                pairs = pairs + (multiply_pairs(~shifted & -0x3FFF4000, scale, PTX),)  # noqa: RUF005
        sums = _add_plane(sums, pairs, x[plane], PTX)
    return sums


@triton.jit
def _add_int8(
    sums, slot, pieces_ptr, scales_ptr, tile, block, x, PLANES: tl.constexpr, PTX: tl.constexpr
):
    """Add the products of four planes of int8 weights and a block of x."""
    thread = tl.arange(0, sums[0][0].shape[0])
    r = thread // 4 % 8
    for plane in tl.static_range(4):
        if PTX:
            codes_at, scales_at = slot + 512 * plane, slot + (2048 + 32 * plane)
        else:  # planes beyond the last repeat it, times x of 0
            index = tile * PLANES + tl.minimum(4 * block + plane, PLANES - 1)
            codes_at = pieces_ptr.to(tl.pointer_type(tl.uint8)) + 512 * index
            scales_at = scales_ptr.to(tl.pointer_type(tl.uint8)) + 32 * index
        words = read_four(codes_at + 16 * (thread % 32), PTX)
        both = read_float(scales_at + 4 * r, PTX).to(tl.int32, bitcast=True)
        # decode 16 bytes of a thread to eight pairs of bf16, by the scales of rows r and r + 8
        pairs = ()
        for row in tl.static_range(2):
            scale, offset = _pair_of_scales((both >> (16 * row)) & 0xFFFF, PTX)
            for word in tl.static_range(2):
                pairs = pairs + _weights(words[2 * row + word], scale, offset, PTX)
        sums = _add_plane(sums, pairs, x[plane], PTX)
    return sums


@triton.jit
def _add_plane(sums, pairs, octets, PTX: tl.constexpr):
    """Add the products of a plane of 16 rows of w and all rows of x."""
    added = ()
    for t in tl.static_range(len(sums)):
        added = added + (add_products(sums[t], pairs, octets[t], PTX),)  # noqa: RUF005
    return added


@triton.jit
def _add_squares(squares, x, PTX: tl.constexpr):
    """Add the products of a warp's block of x and itself."""
    OCTETS: tl.constexpr = len(squares)
    for plane in tl.static_range(4):
        # as 16 rows of w: the first and the last eight rows of x, whose diagonals are the squares
        both, added = x[plane][0] + x[plane][OCTETS - 1], ()
        for t in tl.static_range(OCTETS):
            added = added + (add_products(squares[t], both, x[plane][t], PTX),)  # noqa: RUF005
        squares = added
    return squares


@triton.jit
def _write_units(units, at, thread, PTX: tl.constexpr):
    """Write a warp's sums to its own shared memory, before the barrier."""
    if PTX:
        wait_for_warp(thread)
    for t in tl.static_range(len(units)):
        words = ()
        for j in tl.static_range(4):
            words = words + (units[t][j].to(tl.int32, bitcast=True),)  # noqa: RUF005
        write_four(at + (UNIT_BYTES * t + 16 * (thread % 32)), words, PTX)


@triton.jit
def _sum_unit(at, APART: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr):
    """Sum a unit over warps, whose accumulators are `APART` bytes apart."""
    sums = (tl.zeros(at.shape, tl.float32),) * 4
    for w in tl.static_range(WARPS):
        words, total = read_four(at + APART * w, PTX), ()
        for j in tl.static_range(4):
            total = total + (sums[j] + words[j].to(tl.float32, bitcast=True),)  # noqa: RUF005
        sums = total
    return sums


@triton.jit(do_not_specialize=["M", "N", "tiles"])
@no_type_check
def _prepacked_rows_kernel(
    x_ptr, pieces_ptr, scales_ptr, added_ptr, y_ptr, instead_ptr,
    M, N, K, tiles, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, INT8: tl.constexpr,
    HEIGHT: tl.constexpr, OCTETS: tl.constexpr, BLOCKS: tl.constexpr, PLANES: tl.constexpr,
    WARPS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr,
    OF_TILE: tl.constexpr, BYTES: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply `8 * OCTETS` rows of x by `HEIGHT` tiles; a warp has every `WARPS`-th block."""
    thread = tl.arange(0, 32 * WARPS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    zero = tl.zeros(thread.shape, tl.float32)
    first_tile = tl.program_id(0).to(tl.int64) * HEIGHT
    first_row = tl.program_id(1) * (8 * OCTETS)
    # a thread loads columns 8 c .. of row r of x, for each group of eight rows
    x_starts = ()
    for t in tl.static_range(OCTETS):  # rows from M on repeat the last, and are not stored
        row = tl.minimum(first_row + 8 * t + r, M - 1)
        x_starts = x_starts + (x_ptr + row * (K // 4),)  # noqa: RUF005

    # shared memory: for each warp pieces, then sums; after all warps, the squares
    OF_WARP: tl.constexpr = OF_TILE * HEIGHT
    memory = memory_of(instead_ptr, thread, BYTES, PTX)
    mine, squares_at = memory + OF_WARP * warp, memory + OF_WARP * WARPS
    # weights do not depend on the previous kernel: their copies start before the wait
    copied = (pieces_ptr, scales_ptr, first_tile, tiles)
    if PTX:
        for stage in tl.static_range(STAGES):
            block, slot = warp + WARPS * stage, mine + PIECE * stage
            _copy_block(block, slot, HEIGHT, *copied, BLOCKS, PLANES, OF_TILE, INT8)
            commit(thread)
    wait_for_last(OVERLAP)

    # multiply: weights are decoded once for all rows of x
    nothing = ((zero,) * 4,) * OCTETS
    squares = nothing
    if STEPS <= 2:  # several tiles: blocks of x stay in registers
        blocks = ()
        for s in tl.static_range(STEPS):
            blocks = blocks + (_load_block(x_starts, warp + WARPS * s, K, PTX),)  # noqa: RUF005
        if NORM:
            for s in tl.static_range(STEPS):
                squares = _add_squares(squares, blocks[s], PTX)
        if PTX:
            wait_for_copies(0, thread)
        for i in range(HEIGHT):
            sums, tile_memory = nothing, mine + OF_TILE * i
            for s in tl.static_range(STEPS):
                sums = _add_block(
                    sums, tile_memory + PIECE * s, pieces_ptr, scales_ptr,
                    tl.minimum(first_tile + i, tiles - 1), warp + WARPS * s, blocks[s],
                    BLOCKS, PLANES, INT8, PTX,
                )  # fmt: skip
            _write_units(sums, tile_memory, thread, PTX)  # reuse the memory of the pieces
    else:  # one tile: prefetch two blocks of x while another one is multiplied
        sums = nothing
        even = _load_block(x_starts, warp, K, PTX)
        odd = _load_block(x_starts, warp + WARPS, K, PTX)
        for first in range(0, STEPS, 2):
            for turn in tl.static_range(2):
                step = first + turn
                block, slot = warp + WARPS * step, mine + PIECE * (step % STAGES)
                if PTX:
                    wait_for_copies(STAGES - 1, thread)
                x = odd if turn else even
                sums = _add_block(
                    sums, slot, pieces_ptr, scales_ptr, first_tile, block, x,
                    BLOCKS, PLANES, INT8, PTX,
                )  # fmt: skip
                if NORM:
                    squares = _add_squares(squares, x, PTX)
                if turn:
                    odd = _load_block(x_starts, block + 2 * WARPS, K, PTX)
                else:
                    even = _load_block(x_starts, block + 2 * WARPS, K, PTX)
                if PTX:
                    if STAGES < STEPS:  # refill the slot that all threads have read
                        wait_for_warp(thread)
                        if step + STAGES < STEPS:
                            block += WARPS * STAGES
                            _copy_block(block, slot, 1, *copied, BLOCKS, PLANES, OF_TILE, INT8)
                    commit(thread)
        if PTX:
            wait_for_copies(0, thread)
        _write_units(sums, mine, thread, PTX)
    if NORM:  # the square of row 8 t + r is in thread 4 r + r // 2
        for t in tl.static_range(OCTETS):
            square = tl.where(r % 2 == 0, squares[t][2 * t], squares[t][2 * t + 1])
            to = squares_at + 4 * (8 * (OCTETS * warp + t) + r)
            write_where(to, square, c == r // 2, PTX)
    tl.debug_barrier()

    # sum over warps in their order, normalise, and store: a warp has every `WARPS`-th unit
    UNITS: tl.constexpr = HEIGHT * OCTETS
    for turn in tl.static_range(0, UNITS, WARPS):
        unit = turn + warp
        some, unit = unit < UNITS, tl.minimum(unit, UNITS - 1)
        i, t = unit // OCTETS, unit % OCTETS
        at = memory + (OF_TILE * i + UNIT_BYTES * t + 16 * (thread % 32))
        y = _sum_unit(at, OF_WARP, WARPS, PTX)
        n = (first_tile + i) * (8 if GATED else 16) + r
        for j in tl.static_range(2):  # rows 2 c and 2 c + 1 of x
            m, factor = first_row + 8 * t + 2 * c + j, zero + (1.0 if INT8 else 0.5)
            if NORM:
                square, at = zero, squares_at + 4 * (8 * t + 2 * c + j)
                for w in tl.static_range(WARPS):
                    square += read_float(at + 32 * OCTETS * w, PTX)
                factor *= tl.rsqrt(square / K + eps)
            upper, lower = y[j] * factor, y[2 + j] * factor
            store_both(upper, lower, added_ptr, y_ptr, m, n, N, some & (m < M), GATED, ADD)


class Tiling(NamedTuple):
    """Partition of a product among programs and warps."""

    height: int
    """Tiles per program; each element of x is loaded once for all of them."""
    octets: int
    """Number of groups of eight rows of x per program; trits are decoded once for all of them."""
    warps: int
    """Warps per program: a function of the matrix only, as it fixes the order of sums."""
    steps: int
    """Maximum number of blocks of columns per warp."""
    stages: int
    """Number of these blocks in shared memory at a time."""

    piece_bytes: int = PIECE_BYTES.value
    """Bytes of a block of 16 rows by 128 columns."""

    @property
    def tile_bytes(self) -> int:
        """Compute the bytes of shared memory per warp and tile: for pieces, then sums."""
        return max(self.piece_bytes * self.stages, UNIT_BYTES.value * self.octets)

    @property
    def shared_bytes(self) -> int:
        """Compute the bytes of shared memory per program: for tiles, and squares of rows."""
        return self.warps * (self.height * self.tile_bytes + 32 * self.octets)


def _tiling(
    rows: int, tiles: int, blocks: int, processors: int, piece_bytes: int = PIECE_BYTES.value
) -> Tiling:
    """Choose the tiling that was fastest on an H200 for the matrices of `1b`."""
    octets, warps = 1 if rows <= 8 else 2, 8 if blocks > 4 else 4
    steps, groups = triton.cdiv(blocks, warps), triton.cdiv(rows, 8 * octets)
    fit = SHARED_BYTES // (warps * piece_bytes)
    stages = min(steps, fit)
    if steps > 2:
        return Tiling(1, octets, warps, steps, stages, piece_bytes)
    few = tiles * groups <= 4 * processors  # one program per multiprocessor is then enough
    programs = processors * (1 if few else 3 if octets == 1 else 2)
    height = min(4, fit // steps, triton.cdiv(tiles * groups, programs))
    return Tiling(height, octets, warps, steps, stages, piece_bytes)


def multiply_prepacked(
    x: Tensor, pieces: Tensor, scales: Tensor | None, out_features: int, in_features: int,
    gated: bool, eps: float | None, added: Tensor | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Launch the kernel of `prepacked_rows`, or, with `scales`, that of `int8_matmul`."""
    y = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    tiles, blocks, ternary = len(pieces), triton.cdiv(in_features, BLOCK), scales is None
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    to = y if added is None else added.contiguous()
    piece_bytes = PIECE_BYTES.value if ternary else INT8_BYTES
    tiling = _tiling(len(x), tiles, blocks, num_processors(x), piece_bytes)
    height, octets, warps, steps, stages, _ = tiling
    grid = triton.cdiv(tiles, height), triton.cdiv(len(x), 8 * octets)
    size = tiling.shared_bytes
    instead = pieces if HAS_PTX else pieces.new_empty(grid[0] * grid[1] * size)
    words = pieces.flatten().view(torch.int64)
    _prepacked_rows_kernel[grid](
        x.flatten().view(torch.int64), words,
        words if scales is None else scales.flatten().view(torch.int64), to, y, instead,
        len(x), out_features, in_features, tiles, 0.0 if eps is None else eps,
        NORM=eps is not None, GATED=gated, ADD=added is not None, INT8=not ternary,
        HEIGHT=height, OCTETS=octets, BLOCKS=blocks, PLANES=1 if ternary else pieces.shape[1],
        WARPS=warps, STEPS=steps, STAGES=stages, PIECE=piece_bytes, OF_TILE=tiling.tile_bytes,
        BYTES=size, PTX=HAS_PTX, num_warps=warps, maxnreg=128, **overlap_options(x),
    )  # fmt: skip
    return y


def _prepacked_rows_triton(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    return multiply_prepacked(x, pieces, None, out_features, in_features, gated, eps, added, dtype)


def prepacked_rows(
    x: Tensor, weight: Prepacked, eps: float | None = None, added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Normalise rows, multiply by a prepacked matrix, gate the products and add `added`.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 64 rows, K a multiple of 8; on a CPU float32 too, and
            any number of rows.
        weight: the prepacked matrix.
        eps: added to the mean square; None omits the norm.
        added: like the result; None omits the sum.
        dtype: dtype of the result, bfloat16 or float32; the default is that of `x`.

    Returns:
        (M, N) in `dtype`, accumulated in float32 and rounded once. A row's bits do not depend on
        other rows, nor on M.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    return PREPACKED_ROWS(x, *weight, eps, added, dtype or x.dtype)


PREPACKED_ROWS = Operation(
    "prepacked_rows", _prepacked_rows_triton, prepacked_torch, PREPACKED_SCHEMA,
    native=prepacked_native, where=few_rows_fit(MAX_TEXTS),
)  # fmt: skip

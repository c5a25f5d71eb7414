"""Products of up to 8 rows, each with the bits that `row_matmul` gives it by itself.

So bytes of a text that are read together give what they give one by one. The equations, how w lies
and how x is rounded are those of `row_matmul`, and so is the order of every sum of float32: of the
planes of a block, of the blocks of a step, of the steps of a row, and of the squares of a row. The
sums of integers, which are exact in any order, are formed otherwise.

Work. Weights are loaded once for all rows. The matrix instruction multiplies a block of 16 rows of
w by four rows of x, two columns each: thread 4 r + c has j = c of each block, and the results of
rows r and r + 8 of w and row c of x. As many rows of x as fit in shared memory, four at most, are
rounded and multiplied at a time.
"""

from functools import partial
from typing import no_type_check

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_parts import PartsOfRows
from arbcli.kernels.codec.warp_products import HAS_PTX, add_byte_products, unpair
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul import row_matmul as of_row
from arbcli.kernels.matmul.prepacked import (
    BLOCK,
    PIECE_BYTES,
    PREPACKED_ARGUMENTS,
    Prepacked,
    draw_prepacked,
    prepacked_cases,
    prepacked_in_float64,
    prepacked_native,
    prepacked_reference,
    prepacked_timings,
    prepacked_torch,
)
from arbcli.kernels.matmul.row_matmul import (
    HALF,
    MOST_COLUMNS,
    SUMS,
    TABLE,
    finish,
    mask_of,
    take_x,
    width_of,
)
from arbcli.kernels.matmul.swizzled import MOST_ROWS, few_rows_fit
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import num_processors
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.shared_memory import (
    memory_of,
    read_four,
    read_four_where,
    write,
    write_where,
)
from arbcli.kernels.runtime.threads import across, load_constant, warp_number

SHARED_BYTES = 47 << 10
"""Capacity of a program for rows of x, their sums and their squares."""
ROWS_AT_ONCE = 4
"""Rows of x that an instruction has room for."""
REGISTERS, MORE_REGISTERS = 128, 224
"""Of a thread, at most; where a thread has several eights of a row of x, more."""


def _rows_of(x: Tensor | PartsOfRows) -> Tensor:
    if isinstance(x, PartsOfRows):
        return torch.stack([x.of(row).average() for row in range(len(x.values))])
    return x


def _row_by_row_torch(
    x: Tensor | PartsOfRows, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype, early: bool = False,
) -> Tensor:  # fmt: skip
    return prepacked_torch(_rows_of(x), pieces, out_features, in_features, gated, eps, added, dtype)


def _row_by_row_native(
    x: Tensor | PartsOfRows, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype, early: bool = False,
) -> Tensor:  # fmt: skip
    return prepacked_native(
        _rows_of(x), pieces, out_features, in_features, gated, eps, added, dtype
    )


@triton.jit
def _multiply_block(codes, scales, x_at, tables_at, some, thread, PTX: tl.constexpr):
    """Multiply 16 rows of a block by four rows of x: what rows r and r + 8 give with row c.

    Args:
        codes: four words of a thread.
        scales: of rows r and r + 8, four words.
        x_at: where the block is in shared memory, of the row of x that a thread supplies.
        tables_at: where its table is, of row c.
        some: whether there is the row of x that a thread supplies.
        thread: the numbers of the threads.
        PTX: whether PTX is understood.
    """
    nothing = tl.zeros_like(thread)
    x = read_four_where(x_at, some, (nothing,) * 4, PTX)
    x = x + read_four_where(x_at + 16, some, (nothing,) * 4, PTX)
    totals, units = read_four(tables_at, PTX), read_four(tables_at + 16, PTX)
    upper, lower = tl.zeros(thread.shape, tl.float32), tl.zeros(thread.shape, tl.float32)
    for i in tl.static_range(4):
        mask = mask_of(i)
        masked = (codes[0] & mask, codes[1] & mask, codes[2] & mask, codes[3] & mask)
        four = add_byte_products((nothing,) * 4, masked, (x[2 * i], x[2 * i + 1]), PTX)
        unit = units[i].to(tl.float32, bitcast=True)
        of_upper = (four[0] << 8) + (four[1] - totals[i])
        of_lower = (four[2] << 8) + (four[3] - totals[i])
        upper += of_upper.to(tl.float32) * (unpair(scales[i // 2])[i % 2] * unit)
        lower += of_lower.to(tl.float32) * (unpair(scales[2 + i // 2])[i % 2] * unit)
    return upper, lower


@triton.jit
def _do_step(
    codes, scales, step, sums_at, x_at, tables_at, thread,
    ROWS: tl.constexpr, STEPS: tl.constexpr, PER_TILE: tl.constexpr, ABREAST: tl.constexpr,
    OF_ROW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Do a warp's step for some rows of x, and write its sums."""
    r, c = thread // 4 % 8, thread % 4
    first = step % PER_TILE * ABREAST
    supplied, some = tl.minimum(r // 2, ROWS - 1), r // 2 < ROWS
    own = tl.minimum(c, ROWS - 1)
    of_x = x_at + (OF_ROW * supplied + HALF * (r % 2) + 32 * c)
    of_tables = tables_at + OF_ROW * own
    uppers, lowers = (), ()
    for b in tl.static_range(ABREAST):
        upper, lower = _multiply_block(
            codes[b], scales[b], of_x + 2 * HALF * (first + b), of_tables + TABLE * (first + b),
            some, thread, PTX,
        )  # fmt: skip
        uppers = uppers + (upper,)  # noqa: RUF005
        lowers = lowers + (lower,)  # noqa: RUF005
    if ABREAST == 4:
        upper = (uppers[0] + uppers[1]) + (uppers[2] + uppers[3])
        lower = (lowers[0] + lowers[1]) + (lowers[2] + lowers[3])
    else:
        upper, lower = uppers[0], lowers[0]
    at = sums_at + (SUMS * (STEPS * own + step) + 4 * r)
    write_where(at, upper, c < ROWS, PTX)
    write_where(at + 32, lower, c < ROWS, PTX)


@triton.jit
def _take_row(
    x_ptr, totals_ptr, parts, K, x_at, tables_at, squares_at, thread,
    NORM: tl.constexpr, WARPS: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Round a row of x to shared memory, and write the squares of each warp."""
    THREADS: tl.constexpr = 32 * WARPS
    TURNS: tl.constexpr = UNITS // THREADS
    squares = tl.zeros(thread.shape, tl.float32)
    if TURNS > 0:
        squares += take_x(
            x_ptr, totals_ptr, parts, 0, K, x_at, tables_at, thread,
            TURNS, UNITS, WIDTH, WHOLE, PTX,
        )  # fmt: skip
    if TURNS * THREADS < UNITS:
        some = warp_number() * 32 + TURNS * THREADS < UNITS if PTX else True
        if some:
            squares += take_x(
                x_ptr, totals_ptr, parts, TURNS * THREADS, K, x_at, tables_at, thread,
                1, UNITS, WIDTH, WHOLE, PTX,
            )  # fmt: skip
    if NORM:
        for turn in tl.static_range(5):
            squares += across(squares, 1 << turn, PTX)
        write(squares_at + 4 * (thread // 32), squares, PTX)


@triton.jit
def _do_rows(
    codes, scales, x_ptr, added_ptr, y_ptr, totals_ptr, position, N, K, share, eps, most, span,
    of_parts, of_totals, first_tile, x_at, sums_at, squares_at, thread, start: tl.constexpr,
    ROWS: tl.constexpr, MORE: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, ABREAST: tl.constexpr, HEIGHT: tl.constexpr, PER_TILE: tl.constexpr,
    WARPS: tl.constexpr, WIDE: tl.constexpr, OF_ROW: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiply some rows of x from `start` on, and store what they give."""
    STEPS: tl.constexpr = HEIGHT * PER_TILE
    UNITS: tl.constexpr = ROWS * HEIGHT
    warp, zero = thread // 32, tl.zeros(thread.shape, tl.float32)
    for own in tl.static_range(ROWS):
        parts, x_of_row, totals_of_row = 1, x_ptr + (start + own) * (K // 4), totals_ptr
        if WIDTH > 0:
            parts = tl.minimum(tl.cdiv(position + (start + own + 1), span), most)
            x_of_row = x_ptr + (start + own) * of_parts
            totals_of_row = totals_ptr + (start + own) * of_totals
        _take_row(
            x_of_row, totals_of_row, parts, K, x_at + OF_ROW * own,
            x_at + (OF_ROW * own + 2 * HALF * WIDE), squares_at + 4 * WARPS * own, thread,
            NORM, WARPS, 16 * WIDE, WIDTH, WHOLE, PTX,
        )  # fmt: skip
    tl.debug_barrier()
    for turn in tl.static_range(0, STEPS, WARPS):
        some = True
        if turn + WARPS > STEPS:
            some = warp_number() + turn < STEPS if PTX else True
        if some:
            _do_step(
                codes[turn // WARPS], scales[turn // WARPS],
                tl.minimum(warp + turn, STEPS - 1), sums_at, x_at, x_at + 2 * HALF * WIDE,
                thread, ROWS, STEPS, PER_TILE, ABREAST, OF_ROW, PTX,
            )  # fmt: skip
    tl.debug_barrier()
    for first in tl.static_range(0, UNITS, 2 * WARPS):  # sixteen threads store a tile of a row
        some = warp_number() * 2 + first < UNITS if PTX else True
        if some:
            unit = tl.minimum(first + thread // 16, UNITS - 1)
            row_of_x, of_tile, row = unit // HEIGHT, unit % HEIGHT, thread % 16
            n = (first_tile + of_tile) * (8 if GATED else 16) + (row % 8 if GATED else row)
            stored = (first + thread // 16 < UNITS) & (n < N) & (row < (8 if GATED else 16))
            to, added = (start + row_of_x) * N + n, zero
            if ADD:
                of_row = tl.load(added_ptr + to, mask=stored, other=0, cache_modifier=".cg")
                added = of_row.to(tl.float32)
            at = sums_at + (SUMS * (STEPS * row_of_x + PER_TILE * of_tile) + 4 * row)
            squares = squares_at + 4 * WARPS * row_of_x
            y = finish(at, squares, share, eps, added, NORM, GATED, PER_TILE, WARPS, PTX)
            tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=stored)
    if MORE:
        tl.debug_barrier()


@triton.jit(do_not_specialize=["N", "K", "tiles", "most", "span", "of_parts", "of_totals"])
@no_type_check
def _row_by_row_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr, instead_ptr, totals_ptr, position_ptr,
    N, K, tiles, share, eps, most, span, of_parts, of_totals,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr,
    AT_ONCE: tl.constexpr, ABREAST: tl.constexpr, HEIGHT: tl.constexpr, BLOCKS: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
    BYTES: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    THREADS: tl.constexpr = 32 * WARPS
    thread = tl.arange(0, THREADS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    PER_TILE: tl.constexpr = (BLOCKS + ABREAST - 1) // ABREAST
    STEPS: tl.constexpr = HEIGHT * PER_TILE
    WIDE: tl.constexpr = width_of(BLOCKS, ABREAST)
    OF_ROW: tl.constexpr = (2 * HALF + TABLE) * WIDE
    first_tile = tl.program_id(0) * HEIGHT

    # all that a warp multiplies, as in `row_matmul` but for the parts of a block that lanes have
    codes, scales = (), ()
    for turn in tl.static_range(0, STEPS, WARPS):
        step = tl.minimum(warp + turn, STEPS - 1)
        tile = tl.minimum(first_tile + step // PER_TILE, tiles - 1)
        of_step, scales_of_step = (), ()
        for b in tl.static_range(ABREAST):
            block = tl.minimum(step % PER_TILE * ABREAST + b, BLOCKS - 1)
            piece = pieces_ptr + ((tile * BLOCKS + block).to(tl.int64) * (PIECE_BYTES // 8) + 2 * r)
            of_step = of_step + (load_constant(piece + 16 * c, PTX),)  # noqa: RUF005
            scales_of_step = scales_of_step + (load_constant(piece + 64, PTX),)  # noqa: RUF005
        codes = codes + (of_step,)  # noqa: RUF005
        scales = scales + (scales_of_step,)  # noqa: RUF005

    x_at = memory_of(instead_ptr, thread, BYTES, PTX)
    sums_at = x_at + OF_ROW * AT_ONCE
    squares_at = sums_at + SUMS * STEPS * AT_ONCE
    position = 0
    if WIDTH > 0:
        position = tl.load(position_ptr)
    wait_for_last(OVERLAP, EARLY)

    for start in tl.static_range(0, M, AT_ONCE):
        _do_rows(
            codes, scales, x_ptr, added_ptr, y_ptr, totals_ptr, position, N, K, share, eps, most,
            span, of_parts, of_totals, first_tile, x_at, sums_at, squares_at, thread, start,
            min(AT_ONCE, M - start), start + AT_ONCE < M, NORM, GATED, ADD, ABREAST, HEIGHT,
            PER_TILE, WARPS, WIDE, OF_ROW, WIDTH, WHOLE, PTX,
        )  # fmt: skip


def _rows_at_once(rows: int, tiling: of_row.Tiling, blocks: int) -> int:
    """Choose how many rows a program has at a time, about as many in each turn."""
    fit = max(1, min(ROWS_AT_ONCE, SHARED_BYTES // tiling.shared_bytes(blocks)))
    return -(-rows // -(-rows // fit))


def _row_by_row_triton(
    x: Tensor | PartsOfRows, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype | None, early: bool = False,
) -> Tensor:  # fmt: skip
    rows = len(x.values) if isinstance(x, PartsOfRows) else len(x)
    y = torch.empty(rows, out_features, dtype=dtype, device=pieces.device)
    tiles, blocks = pieces.shape[:2]
    to = y if added is None else added.contiguous()
    totals, position, most, span, width = to, to, 1, 1, 0
    apart = 0, 0
    if isinstance(x, PartsOfRows):
        _, most, heads = x.totals.shape
        totals, position, span, width = x.totals, x.position, x.span, in_features // heads
        apart = most * in_features // 4, most * heads
        x = x.values
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    tiling = of_row.tiling_of(tiles, blocks, num_processors(x))
    at_once = _rows_at_once(rows, tiling, blocks)
    size, grid = at_once * tiling.shared_bytes(blocks), triton.cdiv(tiles, tiling.height)
    instead = pieces if HAS_PTX else pieces.new_empty(grid * size)
    _row_by_row_kernel[(grid,)](
        x.flatten().view(torch.int64), pieces.view(torch.int64), to, y, instead, totals, position,
        out_features, in_features, tiles, 1 / in_features, 0.0 if eps is None else eps,
        most, span, *apart,
        NORM=eps is not None, GATED=gated, ADD=added is not None, M=rows, AT_ONCE=at_once,
        ABREAST=tiling.abreast, HEIGHT=tiling.height, BLOCKS=blocks, WARPS=tiling.warps,
        WIDTH=width, WHOLE=in_features == BLOCK * width_of(blocks, tiling.abreast), EARLY=early,
        BYTES=size, PTX=HAS_PTX, num_warps=tiling.warps,
        maxnreg=REGISTERS if blocks <= 2 * tiling.warps else MORE_REGISTERS, **overlap_options(x),
    )  # fmt: skip
    return y


def row_by_row(
    x: Tensor | PartsOfRows,
    weight: Prepacked,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
    early: bool = False,
) -> Tensor:
    """Normalise rows, multiply them by a prepacked matrix, gate the result and add to it.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 8 rows, K a multiple of 8 and at most `MOST_COLUMNS`;
            or parts of attention of as many positions, whose averages they are. On a CPU float32
            too.
        weight: the matrix, and whether the result is gated.
        eps: added to the mean square; None leaves the norm out.
        added: like the result; None leaves the sum out.
        dtype: of the result, bfloat16 or float32; by default that of `x`.
        early: as of `row_matmul`.

    Returns:
        (M, N) in `dtype`; each row has the bits of `row_matmul` of that row.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    rows = x.values[:, 0].contiguous() if isinstance(x, PartsOfRows) else x
    inputs = *weight, eps, added, dtype or rows.dtype
    ROW_BY_ROW.check(rows, *inputs)
    return ROW_BY_ROW.chosen(rows)(x, *inputs, early)


SHAPES = (
    (2, 34, 1000, 32, True, 1e-6, True), (4, 17, 328, 96, False, 1e-6, True),
    (8, 90, 136, 32, True, None, False), (5, 20, 1288, 32, False, 1e-6, False),
    (1, 1, 8, 32, False, 0.1, False),
)  # fmt: skip
"""(M, rows, K, G, gated, eps, whether something is added)."""
TIMED = tuple((4, *shape[1:]) for shape in of_row.TIMED)


def _draw_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    rows = 1 + (m - 1) % MOST_ROWS
    x, *rest = draw_prepacked(dice, group_size, rows, n, min(k, MOST_COLUMNS))
    return (8 * x).round(), *rest


ROW_BY_ROW = Operation(
    "row_by_row", _row_by_row_triton, _row_by_row_torch, prepacked_reference,
    partial(prepacked_cases, SHAPES), of_row.ROW_MATMUL.gate, PREPACKED_ARGUMENTS,
    where=(*few_rows_fit(MOST_ROWS), f"in_features <= {MOST_COLUMNS}"), draw=_draw_rows,
    needs_rows=True, large_reference=prepacked_in_float64, peer=of_row.ROW_MATMUL.torch,
    timings=partial(prepacked_timings, TIMED),
    native=_row_by_row_native,
)  # fmt: skip

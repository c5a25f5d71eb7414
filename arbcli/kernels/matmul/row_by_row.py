"""Products of up to 8 rows, each with the same bits as `row_matmul` of that row.

So bytes of a text that are processed together have the same results as one by one. The equations,
the layout of w, the rounding of x and the order of every float32 sum are those of `row_matmul`:
over the planes of a block, the blocks of a step, the steps of a row, and the squares of a row. Only
sums of integers, which are exact, have another order.

In the instruction of bytes, of 16 rows by 8 columns, the columns are for up to four rows of x:

    column     0      1      2      3      4      5      6      7
    x of        row 0         row 1         row 2         row 3          upper and lower bytes
    w of       thread 4 r + c: j = c of one block of 128, of rows r and r + 8

Reason: codes are loaded and masked once for all rows of x. Each row of x has its own columns, so
    that its float32 sums have the order of `row_matmul`, whose columns are four blocks of one row.

Work. Weights are loaded once for all rows. The matrix instruction multiplies a block of 16 rows of
w by four rows of x, two columns each: thread 4 r + c has j = c of each block, and the results of
rows r and r + 8 of w and row c of x. As many rows of x as fit in shared memory are rounded at a
time, by all warps. A task is the part of a row, with its squares, that one warp of `row_matmul`
rounds. So the number of warps may differ, while each sum has the same order.
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from arbcli.kernels.codec.warp_products import HAS_PTX, add_byte_products, unpair
from arbcli.kernels.matmul import row_matmul as of_row
from arbcli.kernels.matmul.prepacked import (
    BLOCK,
    PIECE_BYTES,
    PREPACKED_ARGUMENTS,
    Prepacked,
    prepacked_native,
    prepacked_torch,
)
from arbcli.kernels.matmul.row_matmul import (
    HALF,
    MOST_COLUMNS,
    SUMS,
    TABLE,
    finish,
    mask_of,
    round_x,
    sum_of_squares,
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
from arbcli.kernels.runtime.threads import across, load_constant, load_new, load_where, warp_number

SHARED_BYTES = 47 << 10
"""Shared memory per program in bytes, for rows of x, their sums and their squares."""
ROWS_OF_INSTRUCTION = tl.constexpr(4)
"""Rows of x per instruction."""
OCTETS = tl.constexpr(2)
"""Groups of eight elements of x that a thread rounds at a time; more need too many registers."""
APART = tl.constexpr(32)
"""Padding in bytes between rows of x in shared memory, and between their sums: threads access four
rows at a time, which must be in different banks."""


@triton.constexpr_function
def _plane_ptx(plane):
    mask, scale = 0x03030303 << 2 * plane, "and.b32 {}, {}, 0xFFFF0000;\n"
    if plane % 2 == 0:
        scale = "shl.b32 {}, {}, 16;\n"
    masked = "".join(f"and.b32 ${i}, ${i + 6}, {mask:#x};\n" for i in range(4))
    return masked + scale.format("$4", "$10") + scale.format("$5", "$11")


def _row_by_row_torch(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype, early: bool = False,
) -> Tensor:  # fmt: skip
    return prepacked_torch(x, pieces, out_features, in_features, gated, eps, added, dtype)


def _row_by_row_native(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype, early: bool = False,
) -> Tensor:  # fmt: skip
    return prepacked_native(x, pieces, out_features, in_features, gated, eps, added, dtype)


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
        mask = mask_of(plane)
        masked = codes[0] & mask, codes[1] & mask, codes[2] & mask, codes[3] & mask
        upper, lower = unpair(first)[plane % 2], unpair(second)[plane % 2]
    return masked, upper, lower


@triton.jit
def _read_rows(x_at, tables_at, r, c, ROWS: tl.constexpr, OF_ROW: tl.constexpr, PTX: tl.constexpr):
    """Read a block of up to four rows of x, and the table entries for a thread's results."""
    at = x_at + (OF_ROW * tl.minimum(r // 2, ROWS - 1) + HALF * (r % 2) + 32 * c)
    if ROWS == ROWS_OF_INSTRUCTION:
        x = read_four(at, PTX) + read_four(at + 16, PTX)
    else:
        nothing = (tl.zeros_like(r),) * 4
        x = read_four_where(at, r // 2 < ROWS, nothing, PTX)
        x = x + read_four_where(at + 16, r // 2 < ROWS, nothing, PTX)
    of_tables = tables_at + OF_ROW * tl.minimum(c, ROWS - 1)
    return x, read_four(of_tables, PTX), read_four(of_tables + 16, PTX)


@triton.jit
def _multiply_block(
    codes, scales, x_at, tables_at, r, c,
    ROWS: tl.constexpr, OF_ROW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiply a block of 16 rows of w by rows of x.

    Args:
        codes: four words per thread.
        scales: scales of rows r and r + 8, four words.
        x_at: shared-memory address of the block in the first row of x.
        tables_at: address of its table for the first row of x.
        r: r of each thread.
        c: c of each thread.
        ROWS: number of rows of x.
        OF_ROW: stride of rows of x in bytes.
        PTX: whether the compiler accepts PTX.

    Returns:
        For each four rows of x, the products of rows r and r + 8 of w with row c of these.
    """
    nothing, zero = tl.zeros_like(r), tl.zeros(r.shape, tl.float32)
    of_rows, sums = (), ()
    for first in tl.static_range(0, ROWS, ROWS_OF_INSTRUCTION):
        some = _read_rows(
            x_at + OF_ROW * first, tables_at + OF_ROW * first, r, c,
            min(ROWS_OF_INSTRUCTION, ROWS - first), OF_ROW, PTX,
        )  # fmt: skip
        of_rows, sums = of_rows + (some,), sums + (zero, zero)  # noqa: RUF005
    for i in tl.static_range(4):
        masked, of_upper, of_lower = _plane_of(codes, scales, i, PTX)
        added = ()
        for k in tl.static_range(len(of_rows)):
            x, totals, units = of_rows[k]
            four = add_byte_products((nothing,) * 4, masked, (x[2 * i], x[2 * i + 1]), PTX)
            unit = units[i].to(tl.float32, bitcast=True)
            upper = ((four[0] << 8) + (four[1] - totals[i])).to(tl.float32)
            lower = ((four[2] << 8) + (four[3] - totals[i])).to(tl.float32)
            added = added + (  # noqa: RUF005
                sums[2 * k] + upper * (of_upper * unit), sums[2 * k + 1] + lower * (of_lower * unit)
            )  # fmt: skip
        sums = added
    return sums


@triton.jit
def _do_step(
    codes, scales, step, sums_at, x_at, tables_at, thread,
    ROWS: tl.constexpr, PER_TILE: tl.constexpr, ABREAST: tl.constexpr,
    OF_ROW: tl.constexpr, OF_SUMS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute a warp's step for several rows of x, and write its sums."""
    r, c = thread // 4 % 8, thread % 4
    block, found = step % PER_TILE * ABREAST, ()
    for b in tl.static_range(ABREAST):
        of_block = _multiply_block(
            codes[b], scales[b], x_at + 2 * HALF * (block + b), tables_at + TABLE * (block + b),
            r, c, ROWS, OF_ROW, PTX,
        )  # fmt: skip
        if b % 2 == 1:
            of_block = _sum_each(found[b // 2], of_block)
            found = found[: b // 2] + (of_block,)  # noqa: RUF005
        else:
            found = found + (of_block,)  # noqa: RUF005
    sums = found[0]
    if ABREAST == 4:
        sums = _sum_each(found[0], found[1])
    for k in tl.static_range(len(sums)):
        row = ROWS_OF_INSTRUCTION * (k // 2) + c
        write_where(
            sums_at + (OF_SUMS * row + SUMS * step + 4 * r + 32 * (k % 2)), sums[k], row < ROWS, PTX
        )


@triton.jit
def _sum_each(a, b):
    sums = ()
    for i in tl.static_range(len(a)):
        sums = sums + (a[i] + b[i],)  # noqa: RUF005
    return sums


@triton.jit
def _task_of(number, warp, ROWS: tl.constexpr, WARPS: tl.constexpr, SQUARES: tl.constexpr):
    """Compute the row and the first group of a warp's task; clamp to the last task."""
    task = tl.minimum(warp + WARPS * number, ROWS * SQUARES - 1)
    return task // SQUARES, task % SQUARES


@triton.jit
def _take_octets(
    x_ptr, K, x_at, tables_at, thread, first: tl.constexpr, SOME: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr, SQUARES: tl.constexpr, GROUPS: tl.constexpr,
    OF_ROW: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Round groups of eight from `first` on to shared memory, and return their squares."""
    TURNS: tl.constexpr = (GROUPS + SQUARES - 1) // SQUARES
    octets, some, units, to, tables = (), (), (), (), ()
    for k in tl.static_range(first, first + SOME):
        row, group = _task_of(k // TURNS, thread // 32, ROWS, WARPS, SQUARES)
        group += SQUARES * (k % TURNS)
        u = 32 * tl.minimum(group, GROUPS - 1) + thread % 32
        of_x = x_ptr + (row * (K // 4) + 2 * u)
        octet = load_new(of_x, PTX) if WHOLE else load_where(of_x, 8 * u < K, False, PTX)
        octets, some, units = octets + (octet,), some + (group < GROUPS,), units + (u,)  # noqa: RUF005
        to, tables = to + (x_at + OF_ROW * row,), tables + (tables_at + OF_ROW * row,)  # noqa: RUF005
    round_x(octets, units, to, tables, PTX)
    squares = ()
    for k in tl.static_range(SOME):
        of_octet = sum_of_squares(octets[k])
        if GROUPS % SQUARES > 0:
            of_octet = tl.where(some[k], of_octet, 0.0)
        squares = squares + (of_octet,)  # noqa: RUF005
    return squares


@triton.jit
def _take_rows(
    x_ptr, K, x_at, tables_at, squares_at, thread,
    ROWS: tl.constexpr, NORM: tl.constexpr, WARPS: tl.constexpr, SQUARES: tl.constexpr,
    GROUPS: tl.constexpr, OF_ROW: tl.constexpr, WHOLE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Round rows of x to shared memory, and write the sums of squares of each task.

    A task is the part of a row that one warp of `row_matmul` rounds: groups of 32 eights,
        `SQUARES` groups apart.
    """
    TURNS: tl.constexpr = (GROUPS + SQUARES - 1) // SQUARES
    TASKS: tl.constexpr = (ROWS * SQUARES + WARPS - 1) // WARPS
    of_octets, squares = (), ()
    for first in tl.static_range(0, TASKS * TURNS, OCTETS):
        of_octets = of_octets + _take_octets(
            x_ptr, K, x_at, tables_at, thread, first, min(OCTETS, TASKS * TURNS - first),
            ROWS, WARPS, SQUARES, GROUPS, OF_ROW, WHOLE, PTX,
        )  # fmt: skip
    if NORM:
        for task in tl.static_range(TASKS):
            of_task = tl.zeros(thread.shape, tl.float32)
            for turn in tl.static_range(TURNS):
                of_task += of_octets[TURNS * task + turn]
            squares = squares + (of_task,)  # noqa: RUF005
        for turn in tl.static_range(5):
            others = ()
            for task in tl.static_range(TASKS):
                others = others + (across(squares[task], 1 << turn, PTX),)  # noqa: RUF005
            squares = _sum_each(squares, others)
        for task in tl.static_range(TASKS):
            row, group = _task_of(task, thread // 32, ROWS, WARPS, SQUARES)
            write(squares_at + 4 * (padded(SQUARES) * row + group), squares[task], PTX)


@triton.constexpr_function
def padded(count):
    """Round up the number of words of a row's squares, which are read in fours."""
    return -(-count // 4) * 4


@triton.jit
def _do_rows(
    codes, scales, x_ptr, added_ptr, y_ptr, N, K, share, eps, first_tile,
    x_at, sums_at, squares_at, thread, start,
    ROWS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, ABREAST: tl.constexpr, HEIGHT: tl.constexpr, PER_TILE: tl.constexpr,
    WARPS: tl.constexpr, ALONE: tl.constexpr, WIDE: tl.constexpr, OF_ROW: tl.constexpr,
    OF_SUMS: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x from `start` on, and store the results."""
    STEPS: tl.constexpr = HEIGHT * PER_TILE
    UNITS: tl.constexpr = ROWS * HEIGHT
    SQUARES: tl.constexpr = min(ALONE, WIDE // 2)
    warp, tables_at = thread // 32, x_at + 2 * HALF * WIDE
    _take_rows(
        x_ptr + start * (K // 4), K, x_at, tables_at, squares_at, thread,
        ROWS, NORM, WARPS, SQUARES, WIDE // 2, OF_ROW, WHOLE, PTX,
    )  # fmt: skip
    tl.debug_barrier()
    for turn in tl.static_range(0, STEPS, WARPS):
        some = True
        if turn + WARPS > STEPS:
            some = warp_number() + turn < STEPS if PTX else True
        if some:
            _do_step(
                codes[turn // WARPS], scales[turn // WARPS],
                tl.minimum(warp + turn, STEPS - 1), sums_at, x_at, tables_at, thread,
                ROWS, PER_TILE, ABREAST, OF_ROW, OF_SUMS, PTX,
            )  # fmt: skip
    tl.debug_barrier()
    for first in tl.static_range(0, UNITS, 2 * WARPS):  # sixteen threads store a tile of a row
        some = warp_number() * 2 + first < UNITS if PTX else True
        if some:
            unit = tl.minimum(first + thread // 16, UNITS - 1)
            row_of_x, of_tile, row = unit // HEIGHT, unit % HEIGHT, thread % 16
            n = (first_tile + of_tile) * (8 if GATED else 16) + (row % 8 if GATED else row)
            stored = (first + thread // 16 < UNITS) & (n < N) & (row < (8 if GATED else 16))
            to, added = (start + row_of_x) * N + n, tl.zeros(thread.shape, tl.float32)
            if ADD:
                of_row = tl.load(added_ptr + to, mask=stored, other=0, cache_modifier=".cg")
                added = of_row.to(tl.float32)
            at = sums_at + (OF_SUMS * row_of_x + SUMS * PER_TILE * of_tile + 4 * row)
            squares = squares_at + 4 * padded(SQUARES) * row_of_x
            y = finish(at, squares, share, eps, added, NORM, GATED, PER_TILE, SQUARES, PTX)
            tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["N", "K", "tiles"])
@no_type_check
def _row_by_row_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr, instead_ptr, N, K, tiles, share, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr,
    EACH: tl.constexpr, AT_ONCE: tl.constexpr, ABREAST: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCKS: tl.constexpr, WARPS: tl.constexpr, ALONE: tl.constexpr, WHOLE: tl.constexpr,
    EARLY: tl.constexpr, BYTES: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    THREADS: tl.constexpr = 32 * WARPS
    thread = tl.arange(0, THREADS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    PER_TILE: tl.constexpr = (BLOCKS + ABREAST - 1) // ABREAST
    STEPS: tl.constexpr = HEIGHT * PER_TILE
    WIDE: tl.constexpr = width_of(BLOCKS, ABREAST)
    OF_ROW: tl.constexpr = (2 * HALF + TABLE) * WIDE + APART
    OF_SUMS: tl.constexpr = SUMS * STEPS + APART
    first_tile = tl.program_id(0) * HEIGHT

    # all weights of a warp, as in `row_matmul` except for the assignment of lanes
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
    squares_at = sums_at + OF_SUMS * AT_ONCE
    wait_for_last(OVERLAP, EARLY)

    first_row = 0
    if EACH < M:
        first_row = tl.minimum(EACH * tl.program_id(1), M - EACH)
    for turn in tl.range(0, (EACH + AT_ONCE - 1) // AT_ONCE, disable_licm=True):
        if turn > 0:
            tl.debug_barrier()
        _do_rows(
            codes, scales, x_ptr, added_ptr, y_ptr, N, K, share, eps, first_tile,
            x_at, sums_at, squares_at, thread,
            first_row + tl.minimum(AT_ONCE * turn, EACH - AT_ONCE),
            AT_ONCE, NORM, GATED, ADD, ABREAST, HEIGHT, PER_TILE, WARPS, ALONE, WIDE, OF_ROW,
            OF_SUMS, WHOLE, PTX,
        )  # fmt: skip


class RowsTiling(NamedTuple):
    """Partition of the work of several rows, in addition to the tiling of `row_matmul`."""

    each: int
    """Rows of x per program."""
    at_once: int
    """Rows of x in shared memory at a time."""
    warps: int
    """Number of warps per program."""
    registers: int
    """Maximum number of registers per thread."""
    shared_bytes: int
    """Shared memory per program in bytes, for its rows of x, their sums and squares."""


def rows_tiling(
    rows: int, alone: of_row.Tiling, tiles: int, blocks: int, processors: int
) -> RowsTiling:
    """Choose the tiling that was fastest for `base` and `1b` on an H100; it does not affect bits.

    A program that is alone on a multiprocessor has one warp per step; if two programs share one,
        each has the warps of `row_matmul`. If multiprocessors would be idle, several programs of
        the same tiles divide the rows of x.
    """
    steps, wide = alone.height * -(-blocks // alone.abreast), width_of(blocks, alone.abreast)
    shared = tiles > processors * alone.height
    warps = max(8, alone.warps if shared else min(16, triton.next_power_of_2(steps)))
    row_bytes = (2 * HALF.value + TABLE.value) * wide + SUMS.value * steps + 2 * APART.value
    row_bytes += 4 * padded(min(alone.warps, wide // 2))
    fit = max(1, min(MOST_ROWS, SHARED_BYTES // row_bytes))
    of_program = -(-rows // programs_of_tiles(rows, -(-tiles // alone.height), processors))
    at_once = -(-of_program // -(-of_program // fit))
    registers = 64 if alone.abreast == 1 else 128
    return RowsTiling(of_program, at_once, warps, registers, row_bytes * at_once)


def programs_of_tiles(rows: int, programs: int, processors: int) -> int:
    """Choose the number of programs that divide the rows of x, per program of tiles."""
    return max(1, min(rows, processors // programs))


def _row_by_row_triton(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype | None, early: bool = False,
) -> Tensor:  # fmt: skip
    rows = len(x)
    y = torch.empty(rows, out_features, dtype=dtype, device=pieces.device)
    tiles, blocks = pieces.shape[:2]
    to = y if added is None else added.contiguous()
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    alone = of_row.tiling_of(tiles, blocks, num_processors(x))
    each, at_once, warps, registers, size = rows_tiling(
        rows, alone, tiles, blocks, num_processors(x)
    )
    grid = triton.cdiv(tiles, alone.height), triton.cdiv(rows, each)
    instead = pieces if HAS_PTX else pieces.new_empty(grid[0] * grid[1] * size)
    _row_by_row_kernel[grid](
        x.flatten().view(torch.int64), pieces.view(torch.int64), to, y, instead,
        out_features, in_features, tiles, 1 / in_features, 0.0 if eps is None else eps,
        NORM=eps is not None, GATED=gated, ADD=added is not None, M=rows, EACH=each,
        AT_ONCE=at_once, ABREAST=alone.abreast, HEIGHT=alone.height, BLOCKS=blocks, WARPS=warps,
        ALONE=alone.warps, WHOLE=in_features == BLOCK * width_of(blocks, alone.abreast),
        EARLY=early, BYTES=size, PTX=HAS_PTX, num_warps=warps, maxnreg=registers,
        **overlap_options(x),
    )  # fmt: skip
    return y


def row_by_row(
    x: Tensor,
    weight: Prepacked,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
    early: bool = False,
) -> Tensor:
    """Normalise rows, multiply by a prepacked matrix, gate the products and add `added`.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 8 rows, K a multiple of 8 and at most `MOST_COLUMNS`.
            On a CPU float32 too.
        weight: the prepacked matrix.
        eps: added to the mean square; None omits the norm.
        added: like the result; None omits the sum.
        dtype: dtype of the result, bfloat16 or float32; the default is that of `x`.
        early: as in `row_matmul`.

    Returns:
        (M, N) in `dtype`; each row has the bits of `row_matmul` of that row.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    inputs = *weight, eps, added, dtype or x.dtype
    ROW_BY_ROW.check(x, *inputs)
    return ROW_BY_ROW.chosen(x)(x, *inputs, early)


ROW_BY_ROW = Operation(
    "row_by_row", _row_by_row_triton, _row_by_row_torch, PREPACKED_ARGUMENTS,
    native=_row_by_row_native, where=(*few_rows_fit(MOST_ROWS), f"in_features <= {MOST_COLUMNS}"),
)  # fmt: skip

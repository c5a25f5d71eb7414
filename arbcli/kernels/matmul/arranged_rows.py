"""Products of up to 64 rows, none of which depends on the others: y = added + gate(norm(x) @ w.T).

Norm, gate and sum are those of `row_matmul`; `arranged` says how w lies. What is promised besides:
a row of the result has the same bits whatever the other rows are, and however many. So a text is
the same whether it is made alone or with others. For that, the order of every sum follows from the
shape of w alone: a warp takes every `warps`-th block of columns, and warps are summed in order.

Work. Thread 4 r + c of a warp decodes bytes 8 c .. 8 c + 7 of rows r and r + 8 of a piece, as in
`few_rows`, and multiplies their trits by the scales before any product, so that all blocks add to
the same sums. The matrix instruction has columns for eight rows of x; for more it is repeated with
the same trits. The squares of the norm are products too: of x with itself, of which the diagonal
is kept.

Pieces are copied to shared memory some steps ahead, the first of them before the kernel waits for
the one that makes x.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.codec.packing import PLANE
from arbcli.kernels.codec.warp_products import (
    HAS_PTX,
    add_products,
    multiply_pairs,
    spread,
    take_digits,
)
from arbcli.kernels.matmul.arranged import (
    BLOCK,
    PIECE_BYTES,
    SCALES_AT,
    SHARED_BYTES,
    TRIT_BYTES,
    Arranged,
    arrange,
    as_words,
    check_few_rows,
    copy_pieces,
    decode_arranged,
    grid_of,
    over_parts,
    read_scales,
    read_unit,
    store_both,
    tiles_reference,
    with_torch,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import num_processors, uses_triton
from arbcli.kernels.runtime.inputs import check_contiguous
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.shared_memory import (
    allocate,
    commit,
    read_four,
    wait_for_copies,
    wait_for_warp,
    write_four,
)
from arbcli.kernels.runtime.spec import MATRIX, Case, Gate, KernelSpec, Timing
from arbcli.kernels.runtime.threads import load_where

MOST_TEXTS = 64
"""Largest M."""
UNIT_BYTES = tl.constexpr(512)
"""What a warp has of 16 rows of w times 8 rows of x: four float32 a thread."""
_FROM_LANE = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")


@triton.jit
def _from_lane_of_warp(value, lane, PTX: tl.constexpr):
    """Fetch a float32 from a thread of the same warp."""
    if PTX:
        return tl.inline_asm_elementwise(
            _FROM_LANE, "=f,f,r", [value, lane], dtype=tl.float32, is_pure=False, pack=1
        )
    thread = tl.arange(0, value.shape[0])
    return tl.gather(value, thread // 32 * 32 + lane, 0)


@triton.jit
def _scale_rows(pairs, word, PTX: tl.constexpr):
    """Multiply the trits of rows r and r + 8, four pairs each, by the scales in a word."""
    upper = (word & 0xFFFF) | (word << 16)
    lower = ((word >> 16) & 0xFFFF) | (word & -0x10000)
    scaled = ()
    for i in tl.static_range(8):
        scaled = scaled + (multiply_pairs(pairs[i], upper if i < 4 else lower, PTX),)  # noqa: RUF005
    return scaled


@triton.jit
def _add_block(
    sums, squares, starts, slot, x_starts, block, blocks, K,
    NORM: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of a warp's block of each tile, and of x with itself."""
    HEIGHT: tl.constexpr = len(starts)
    OCTETS: tl.constexpr = len(x_starts)  # of rows of x
    thread = tl.arange(0, block.shape[0])
    r, c = thread // 4 % 8, thread % 4
    qs, scales = (), ()
    for i in tl.static_range(HEIGHT):
        piece = starts[i] + PIECE_BYTES // 8 * tl.minimum(block, blocks - 1)
        at = slot + PIECE_BYTES * i
        words = read_unit(piece + 16 * c + 2 * r, at + (128 * c + 16 * r), PTX)
        for k in tl.static_range(4):
            qs = qs + spread(words[k], PTX)
        first, last = at + (SCALES_AT + 16 * r), at + (SCALES_AT + 128 + 4 * r)
        scales = scales + (read_scales(piece, r, first, last, PTX),)  # noqa: RUF005
    for digit in tl.static_range(4, -1, -1):
        k = 160 * block + 32 * digit + 8 * c
        x = ()
        for t in tl.static_range(OCTETS):
            x = x + (load_where(x_starts[t] + k // 4, k < K, True, PTX),)  # noqa: RUF005
        pairs, qs = take_digits(qs, digit, PTX)
        added = ()
        for i in tl.static_range(HEIGHT):
            scaled = _scale_rows(pairs[8 * i : 8 * i + 8], scales[i][digit], PTX)
            for t in tl.static_range(OCTETS):
                added = added + (add_products(sums[OCTETS * i + t], scaled, x[t], PTX),)  # noqa: RUF005
        sums = added
        if NORM:
            of_x = ()
            for t in tl.static_range(OCTETS):
                both = x[t // 2 * 2] + x[min(t // 2 * 2 + 1, OCTETS - 1)]
                of_x = of_x + (add_products(squares[t], both, x[t], PTX),)  # noqa: RUF005
            squares = of_x
    return sums, squares


@triton.jit
def _sum_unit(memory, unit, apart, units, PTX: tl.constexpr):
    """Sum over warps what they have of a unit, which may be another one in each warp.

    Args:
        memory: where the first warp's units begin, in shared memory.
        unit: which one.
        apart: bytes from the units of a warp to those of the next.
        units: the same in registers, for where there is no PTX.
        PTX: whether PTX is understood.
    """
    thread = tl.arange(0, unit.shape[0])
    WARPS: tl.constexpr = unit.shape[0] // 32
    found = (tl.zeros(thread.shape, tl.float32),) * 4
    if PTX:
        at = memory + (UNIT_BYTES * unit + 16 * (thread % 32))
        for w in tl.static_range(WARPS):
            words, total = read_four(at + apart * w), ()
            for j in tl.static_range(4):
                total = total + (found[j] + words[j].to(tl.float32, bitcast=True),)  # noqa: RUF005
            found = total
    else:
        for u in tl.static_range(len(units)):
            total = ()
            for j in tl.static_range(4):
                of_all = over_parts(units[u][j], 32 * WARPS, WARPS)
                total = total + (tl.where(unit == u, of_all, found[j]),)  # noqa: RUF005
            found = total
    return found


@triton.jit(do_not_specialize=["M", "N", "tiles", "steps"])
def _arranged_rows_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr,
    M, N, K, tiles, blocks, steps, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    HEIGHT: tl.constexpr, OCTETS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    APART: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS)
    warp, r, c = thread // 32, thread // 4 % 8, thread % 4
    zero, nothing = tl.zeros(thread.shape, tl.float32), tl.zeros_like(thread)
    first_tile = tl.program_id(0).to(tl.int64) * HEIGHT
    first_row = tl.program_id(1) * (8 * OCTETS)
    starts, x_starts = (), ()
    for i in tl.static_range(HEIGHT):
        tile = tl.minimum(first_tile + i, tiles - 1)
        starts = starts + (pieces_ptr + PIECE_BYTES // 8 * blocks * tile,)  # noqa: RUF005
    for t in tl.static_range(OCTETS):  # rows from M on repeat the last, and are not stored
        row = tl.minimum(first_row + 8 * t + r, M - 1)
        x_starts = x_starts + (x_ptr + row * (K // 4),)  # noqa: RUF005
    sums = ((zero,) * 4,) * (HEIGHT * OCTETS)
    squares = ((zero,) * 4,) * (OCTETS if NORM else 0)

    # shared memory of a warp: a ring of slots for the pieces of a step; later, its sums
    SLOT: tl.constexpr = PIECE_BYTES * HEIGHT
    memory, slot = nothing, nothing
    if PTX:
        memory = allocate(APART * WARPS) + nothing
        slot = memory + APART * warp
        for stage in tl.static_range(STAGES):
            copy_pieces(starts, slot + SLOT * stage, warp + WARPS * stage, blocks)
            commit(thread)
    wait_for_last(OVERLAP)
    at = nothing
    for step in range(steps):
        block = WARPS * step + warp
        if PTX:
            wait_for_copies(STAGES - 1, thread)
        sums, squares = _add_block(
            sums, squares, starts, slot + at, x_starts, block, blocks, K, NORM, PTX
        )
        if PTX:
            wait_for_warp(thread)
            if step + STAGES < steps:
                copy_pieces(starts, slot + at, block + WARPS * STAGES, blocks)
            commit(thread)
            at = tl.where(at == SLOT * (STAGES - 1), 0, at + SLOT)
    units = sums + squares
    if PTX:
        wait_for_copies(0, thread)
        for u in tl.static_range(len(units)):
            write_four(slot + (UNIT_BYTES * u + 16 * (thread % 32)), as_words(units[u]))
        tl.debug_barrier()

    # a warp stores every `WARPS`-th unit
    UNITS: tl.constexpr = HEIGHT * OCTETS
    for turn in tl.static_range(0, UNITS, WARPS):
        unit = turn + warp
        some, unit = unit < UNITS, tl.minimum(unit, UNITS - 1)
        i, t = unit // OCTETS, unit % OCTETS
        y = _sum_unit(memory, unit, APART, units, PTX)
        if NORM:
            of_x = _sum_unit(memory, UNITS + t, APART, units, PTX)
        n = (first_tile + i) * (8 if GATED else 16) + r
        for j in tl.static_range(2):
            m = first_row + 8 * t + 2 * c + j
            upper, lower = y[j], y[2 + j]
            if NORM:  # row 2 c + j of x times itself is in thread 4 (2 c + j) + c
                square = tl.where(t % 2 == 0, of_x[j], of_x[2 + j])
                square = _from_lane_of_warp(square, 9 * c + 4 * j, PTX)
                factor = tl.rsqrt(square / K + eps)
                upper, lower = upper * factor, lower * factor
            mask = some & (m < M)
            store_both(upper, lower, added_ptr, y_ptr, m, n, N, mask, GATED, ADD)


class Tiling(NamedTuple):
    """How the work is shared out."""

    height: int
    """Tiles of a program; each element of x is loaded once for all of them."""
    octets: int
    """Eights of rows of x that a program has; trits are decoded once for all of them."""
    registers: int
    """Of a thread, at most: with 128 a processor has room for two programs."""


def warps_of(blocks: int) -> int:
    """Choose the warps of a program; by the matrix alone, as they decide the order of sums."""
    return 8 if blocks > 4 else 4


def _tiling(rows: int, tiles: int, processors: int) -> Tiling:
    """Choose what a program takes, which on an H200 was the fastest for the matrices of `1b`.

    Where a program for each processor is enough, it may have all registers.
    """
    octets = 1 if rows <= 8 else 2 if rows <= 16 else 4
    most, tiles = 3 if octets < 4 else 2, tiles * triton.cdiv(rows, 8 * octets)
    alone = tiles <= most * processors
    height = triton.cdiv(tiles, (1 if alone else 2) * processors)
    return Tiling(min(most, height), octets, 255 if alone else 128)


def _arranged_rows_triton(x, pieces, out_features, in_features, gated, eps, added, dtype):
    y = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    tiles, blocks = pieces.shape[:2]
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    to = y if added is None else added.contiguous()
    height, octets, registers = _tiling(len(x), tiles, num_processors(x))
    warps = warps_of(blocks)
    steps, slot = triton.cdiv(blocks, warps), height * PIECE_BYTES.value
    sums = (height + (eps is not None)) * octets * UNIT_BYTES.value
    stages = max(1, min(steps, SHARED_BYTES // (warps * slot)))
    _arranged_rows_kernel[(triton.cdiv(tiles, height), triton.cdiv(len(x), 8 * octets))](
        x.flatten().view(torch.int64), pieces.view(torch.int64), to, y,
        len(x), out_features, in_features, tiles, blocks, steps, 0.0 if eps is None else eps,
        NORM=eps is not None, GATED=gated, ADD=added is not None,
        HEIGHT=height, OCTETS=octets, STAGES=stages, WARPS=warps,
        APART=max(stages * slot, sums), PTX=HAS_PTX,
        num_warps=warps, maxnreg=registers, **overlap_options(x),
    )  # fmt: skip
    return y


def arranged_rows_reference(
    x: Tensor,
    pieces: Tensor,
    out_features: int,
    in_features: int,
    gated: bool,
    eps: float | None,
    added: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what `arranged_rows` must return, in float64, one piece at a time."""
    tiles, blocks = pieces.shape[:2]
    trits = pieces[..., :TRIT_BYTES].unflatten(2, (4, 8, 2, 8))
    scales = pieces[..., TRIT_BYTES:].contiguous().view(torch.bfloat16).unflatten(2, (40, 2))
    weight = torch.zeros(tiles, 2, 8, BLOCK * blocks, dtype=torch.float64, device=x.device)
    for b in range(blocks):
        for r in range(8):
            for c in range(4):
                for digit in range(5):
                    k = BLOCK * b + PLANE * digit + 8 * c
                    trit = trits[:, b, c, r].long() // 3**digit % 3 - 1  # (T, 2, 8)
                    scale = scales[:, b, 4 * r + digit if digit < 4 else 32 + r].double()
                    scale = scale * (2 if digit % 2 else -2)
                    weight[:, :, r, k : k + 8] = trit * scale[:, :, None]
    return tiles_reference(x, weight[..., :in_features], out_features, gated, eps, added)


def _arranged_rows_torch(x, pieces, out_features, in_features, gated, eps, added, dtype):
    weight = decode_arranged(pieces)[:, :in_features]
    results = []
    for row in x.float():  # one by one, because the sums of a product depend on its rows
        row = row[None] if eps is None else functional.rms_norm(row[None], row.shape, eps=eps)
        y = (row @ weight.T).view(1, -1, 2, 8)
        results.append(functional.silu(y[:, :, 0]) * y[:, :, 1] if gated else y)
    y = torch.cat(results).flatten(1)[:, :out_features]
    return (y if added is None else added + y).to(dtype)


def arranged_rows(
    x: Tensor,
    weight: Arranged,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise rows, multiply them by an arranged matrix, gate the result and add to it.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 64 rows, K a multiple of 8.
        weight: the matrix, and whether the result is gated.
        eps: added to the mean square; None leaves the norm out.
        added: like the result; None leaves the sum out.
        dtype: of the result, bfloat16 or float32; by default that of `x`.

    Returns:
        (M, N) in `dtype`, accumulated in float32 and rounded once. A row's bits do not depend on
        other rows, nor on M.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    dtype = dtype or x.dtype
    like = dtype, weight.out_features
    check_few_rows(x, weight.in_features, added, like, multiple=8, most=MOST_TEXTS)
    shape = *grid_of(weight, BLOCK), PIECE_BYTES.value
    check_contiguous("pieces", weight.pieces, torch.uint8, shape)
    run = _arranged_rows_triton if uses_triton(x) else _arranged_rows_torch
    return run(x, *weight, eps, added, dtype)


SHAPES = (
    (1, 1, 8, 32, False, 0.1, False), (9, 34, 328, 32, True, 1e-6, True),
    (5, 20, 168, 96, False, 1e-6, False), (3, 20, 1512, 32, False, None, True),
    (2, 180, 8, 32, False, None, False), (33, 18, 40, 32, False, 1e-6, True),
)  # fmt: skip
"""(M, rows, K, G, gated, eps, whether something is added)."""


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for m, rows, in_features, group_size, gated, eps, adds in SHAPES:
        packed = random_packed(rows, in_features, group_size, generator, spread=8)
        weight = arrange(packed, gated)
        x = torch.randn(m, in_features, generator=generator)
        x *= 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)
        added = torch.randn(m, weight.out_features, generator=generator)
        for dtype in dtypes:  # bf16 results have a coarser gate
            low = dtype == torch.bfloat16
            label = f"{m}x{rows}x{in_features}{' gate' * gated}{' norm' * (eps is not None)}"
            yield Case(
                f"{label}{' sum' * adds} {str(dtype).removeprefix('torch.')}",
                (x.to(device, torch.bfloat16), weight.pieces.to(device), *weight[1:], eps,
                 added.to(device, dtype) if adds else None, dtype),
                peer=_arranged_rows_torch if low else None,
            )  # fmt: skip


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    half = {"device": device, "dtype": torch.bfloat16}
    (rows, in_features), gated = MATRIX, True
    packed = random_packed(rows, in_features, 32, generator, spread=8)
    weight = arrange(packed, gated)
    for m in (4, 16, 64):
        x, added = torch.randn(m, in_features, **half), torch.randn(m, weight.out_features, **half)
        yield Timing(
            f"{m}x{rows}x{in_features} gate",
            (x, *weight, 1e-6, added, x.dtype),
            peer=partial(with_torch, x, decode_weight(packed), gated, added),
            peer_name="torch and cuBLAS bf16",
            flops=2 * m * rows * in_features,
        )


ARRANGED_ROWS = KernelSpec(
    "arranged_rows", _arranged_rows_triton, _arranged_rows_torch, arranged_rows_reference,
    _cases,
    Gate(
        exact=False,
        relative=1e-3,
        peer_slack=0.1,
        reason="float32 sums of up to 1512 products, added up by the matrix units; in bf16 one"
        " rounding, as torch's float32 has",
    ),
    timings=_timings,
)  # fmt: skip

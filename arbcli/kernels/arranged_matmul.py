"""One row times a matrix, and what is around it: y = added + gate(rms_norm(x) @ w.T).

rms_norm(x) = x / sqrt(mean(x**2) + eps) has no weights, gate(a, b) = silu(a) * b of the two halves
of a row, and each of the three can be left out. The division is left to the end: squares are summed
beside the products.

The trits are *arranged*: still five in a byte, but in the order in which threads load them, so that
a warp takes 16 rows by 160 weights at once, from side to side, whatever K is. In each of these
pieces thread 4 r + c has 16 bytes: the bytes 8 c .. 8 c + 7 of row r, then those of row r + 8, of a
block of 160 weights packed as always. Then come the scales, as bf16 halves of them: five times
(digit d) eight times (row r) those of rows r and r + 8, negative for even digits, as `few_rows`
decodes these to -2 T and the others to 2 T. Where a result is gated, row r + 8 is the one that is
half a matrix behind row r. What is missing to whole pieces is zeros.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels._triton import tl, triton
from arbcli.kernels.backend import uses_triton
from arbcli.kernels.decode_weight import decode_weight, random_packed, scales_torch
from arbcli.kernels.few_rows import HAS_PTX, _add_products, _trits
from arbcli.kernels.overlap import overlap_options, wait_for_last
from arbcli.kernels.packing import PLANE, pack_trits, unpack_trits, unpack_trits_torch
from arbcli.kernels.spec import Case, Gate, KernelSpec, Timing

BLOCK = 5 * PLANE
"""Weights of a row in a piece."""
ROWS = 16
"""Rows of a piece."""
TRIT_BYTES, SCALE_BYTES = 512, 160
"""Of a piece."""


class Arranged(NamedTuple):
    """A matrix in pieces: T tiles of 16 rows by B blocks of 160 columns."""

    pieces: Tensor
    """(T, B, 672) uint8: 32 threads of two rows of eight bytes, then (5, 8, 2) bfloat16 scales."""
    out_features: int
    """N: elements of a result, after gating."""
    in_features: int
    """K."""
    gated: bool
    """Whether a tile has eight rows of each half of the matrix."""


def arrange(
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
    gated: bool = False,
) -> Arranged:
    """Arrange a packed matrix: 2.1 bits a weight, and what fills the last pieces.

    Args:
        packed: (N, row_bytes(K)) uint8.
        exponent: (N, ceil(K / G)) int8.
        fraction: like `exponent`; None stands for zeros.
        in_features: K.
        group_size: G, a multiple of 32.
        gated: whether results are to be gated; then N is even.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    if group_size % PLANE:
        raise ValueError(f"need groups of whole planes of {PLANE} weights, got {group_size}")
    half, odd = divmod(len(packed), 2)
    if gated and odd:
        raise ValueError(f"{len(packed)} rows are not two halves")
    trits = unpack_trits(packed, in_features)
    blocks = -(-in_features // BLOCK)
    group = torch.arange(5 * blocks, device=packed.device) * PLANE // group_size
    scales = scales_torch(exponent, fraction)[:, group.clamp(max=exponent.shape[1] - 1)]
    halves = trits.view(2, half, -1) if gated else trits[None]
    of_halves = scales.view(2, half, -1) if gated else scales[None]
    rows = halves.shape[1]
    missing = -rows % (ROWS // 2 if gated else ROWS)
    halves = functional.pad(halves, (0, BLOCK * blocks - in_features, 0, missing))
    of_halves = functional.pad(of_halves, (0, 0, 0, missing))
    # to (tile, i, r, ...): row r of a tile, and the one that goes with it
    order = (1, 0, 2, 3, 4, 5) if gated else (0, 1, 2, 3, 4, 5)
    split = (2, -1, 8) if gated else (-1, 2, 8)
    pieces = pack_trits(halves.flatten(0, 1)).view(*split, blocks, 4, 8).permute(order)
    of_planes = of_halves.reshape(*split, blocks, 5).permute(order[:5])
    sign = torch.tensor([-0.5, 0.5, -0.5, 0.5, -0.5], device=packed.device)
    pieces = pieces.permute(0, 3, 2, 4, 1, 5).flatten(2)
    of_planes = (of_planes * sign).permute(0, 3, 4, 2, 1).to(torch.bfloat16).flatten(2)
    pieces = torch.cat([pieces, of_planes.view(torch.uint8)], dim=2)
    if pieces.is_cuda:  # a kernel that overlaps reads them before it waits for anything
        torch.cuda.synchronize(pieces.device)
    return Arranged(pieces, rows, in_features, gated)


def takes(x: Tensor, group_size: int) -> bool:
    """Whether a step should arrange its weights: one row of bf16, kernels, and groups of planes."""
    few = x.dtype == torch.bfloat16 and x.numel() == x.shape[-1] and x.shape[-1] % 8 == 0
    return few and uses_triton(x) and group_size % PLANE == 0 and torch.version.hip is None


def arranged_matmul_reference(
    x: Tensor,
    pieces: Tensor,
    out_features: int,
    in_features: int,
    gated: bool,
    eps: float | None,
    added: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what `arranged_matmul` must return, in float64, one piece at a time."""
    tiles, blocks = pieces.shape[:2]
    trits = pieces[..., :TRIT_BYTES].unflatten(2, (32, 2, 8))
    scales = pieces[..., TRIT_BYTES:].contiguous().view(torch.bfloat16).unflatten(2, (5, 8, 2))
    weight = torch.zeros(tiles, 2, 8, BLOCK * blocks, dtype=torch.float64, device=x.device)
    for b in range(blocks):
        for r in range(8):
            for c in range(4):
                for digit in range(5):
                    k = BLOCK * b + PLANE * digit + 8 * c
                    trit = trits[:, b, 4 * r + c].long() // 3**digit % 3 - 1  # (T, 2, 8)
                    scale = scales[:, b, digit, r].double() * (2 if digit % 2 else -2)
                    weight[:, :, r, k : k + 8] = trit * scale[:, :, None]
    x = x.double()
    if eps is not None:
        x = x / ((x * x).sum() / in_features + eps) ** 0.5
    y = weight[..., :in_features] @ x
    if gated:
        y = y[:, 0] / (1 + torch.exp(-y[:, 0])) * y[:, 1]
    y = y.flatten()[:out_features]
    return y if added is None else added.double() + y


def _arranged_matmul_torch(x, pieces, out_features, in_features, gated, eps, added, dtype):
    tiles, blocks = pieces.shape[:2]
    trits, scales = pieces.split([TRIT_BYTES, SCALE_BYTES], dim=2)
    scales = scales.contiguous().view(torch.bfloat16).unflatten(2, (5, 8, 2))
    packed = trits.unflatten(2, (8, 4, 2, 8)).permute(0, 4, 2, 1, 3, 5)
    weight = unpack_trits_torch(packed.reshape(ROWS * tiles, -1), BLOCK * blocks, torch.float32)
    sign = torch.tensor([-2.0, 2.0, -2.0, 2.0, -2.0], device=x.device)
    of_planes = scales.permute(0, 4, 3, 1, 2).float() * sign
    weight = (weight.unflatten(1, (-1, PLANE)) * of_planes.reshape(len(weight), -1, 1)).flatten(1)
    x = x.float()
    if eps is not None:
        x = functional.rms_norm(x, x.shape, eps=eps)
    y = (weight[:, :in_features] @ x).view(tiles, 2, 8)
    if gated:
        y = functional.silu(y[:, 0]) * y[:, 1]
    y = y.flatten()[:out_features]
    return (y if added is None else added + y).to(dtype)


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    return tl.load(pointer)


@triton.jit
def _multiply(upper, lower, x, digit: tl.constexpr, PTX: tl.constexpr):
    """Multiply one digit of two rows' `_trits` by 8 rows of x, each with eight bf16 as two int64.

    Returns:
        Sums of rows r, r, r + 8, r + 8 of w by rows 2 c, 2 c + 1, 2 c, 2 c + 1 of x.
    """
    trits = ()
    for row in tl.static_range(2):
        words = upper if row == 0 else lower
        for i in tl.static_range(2):
            trits = trits + words[i][2 * digit : 2 * digit + 2]
    eight = ()
    for i in tl.static_range(2):
        eight = eight + (x[i].to(tl.int32), (x[i] >> 32).to(tl.int32))  # noqa: RUF005
    return _add_products((0.0, 0.0, 0.0, 0.0), trits, eight, PTX)


@triton.jit
def _load_pieces(
    pieces_ptr, tile, warp, blocks, lane, turn: tl.constexpr,
    EACH: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load what a thread has of `EACH` pieces: its bytes as two int64, and five pairs of scales."""
    loaded = ()
    for i in tl.static_range(EACH):
        block = warp + WARPS * (turn * EACH + i)
        piece, there = tile * blocks + block, block < blocks
        start = pieces_ptr + 84 * piece  # of 672 bytes
        pair = (start + 2 * lane)[:, None] + tl.arange(0, 2)[None, :]
        rows = tl.split(_load(pair, there[:, None], turn * EACH + i >= WHOLE))
        words, scales = (start + 64).to(tl.pointer_type(tl.int32)) + lane // 4, ()
        for digit in tl.static_range(5):
            word = _load(words + 8 * digit, there, turn * EACH + i >= WHOLE)
            scales = scales + (word,)  # noqa: RUF005
        loaded = loaded + ((rows, scales),)  # noqa: RUF005
    return loaded


@triton.jit
def _halves(word):
    """Split an int64 into two int32."""
    return word.to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def _sum_of_squares(word):
    """Add up the squares of the four bf16 elements of an int64."""
    a, b = _halves(word)
    total = tl.zeros(word.shape, tl.float32)
    for i in tl.static_range(2):
        pair = a if i == 0 else b
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = (pair & -0x10000).to(tl.float32, bitcast=True)
        total += low * low + high * high
    return total


@triton.jit
def _decode_row(word, PTX: tl.constexpr):
    first, second = _halves(word)
    return _trits(first, PTX), _trits(second, PTX)


@triton.jit
def _arranged_matmul_kernel(
    x_ptr, pieces_ptr, added_ptr, y_ptr,
    N, K, blocks, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    WARPS: tl.constexpr, EACH: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
    SQUARES: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS)
    warp, lane, c = thread // 32, thread % 32, thread % 4
    tile = tl.program_id(0).to(tl.int64)
    # the first `WHOLE` pieces that any warp takes end within the matrix
    loaded = _load_pieces(pieces_ptr, tile, warp, blocks, lane, 0, EACH, WARPS, WHOLE)
    wait_for_last(OVERLAP)
    upper = tl.zeros(thread.shape, tl.float32)
    lower, squares = upper, upper
    if NORM:  # every thread squares its share of x
        for start in tl.static_range(0, SQUARES):
            at = thread + 32 * WARPS * start
            squares += _sum_of_squares(tl.load(x_ptr + at, mask=4 * at < K, other=0))
    for turn in tl.static_range(ROUNDS):
        first = warp + turn * EACH * WARPS
        if turn > 0:
            loaded = _load_pieces(pieces_ptr, tile, warp, blocks, lane, turn, EACH, WARPS, WHOLE)
        for i in tl.static_range(EACH):
            block = first + WARPS * i
            x_block = x_ptr + (40 * block + 2 * c)
            rows, scales = loaded[i]
            row, other = _decode_row(rows[0], PTX), _decode_row(rows[1], PTX)
            for digit in tl.static_range(5):
                pair = x_block[:, None] + tl.arange(0, 2)[None, :] + 8 * digit
                some = 160 * block + 32 * digit + 8 * c < K
                x = tl.split(_load(pair, some[:, None], turn * EACH + i >= WHOLE))
                products = _multiply(row, other, x, digit, PTX)
                upper += products[0] * (scales[digit] << 16).to(tl.float32, bitcast=True)
                lower += products[2] * (scales[digit] & -0x10000).to(tl.float32, bitcast=True)

    # the four threads of a row have the same sums: one passes on each of them, and one the squares
    if NORM:
        squares = tl.reshape(squares, (8 * WARPS, 4))
        squares = tl.sum(squares, axis=1, keep_dims=True)
        squares = tl.reshape(tl.broadcast_to(squares, (8 * WARPS, 4)), thread.shape)
    sums = tl.where(c == 0, upper, tl.where(c == 1, lower, squares))
    sums = tl.sum(tl.reshape(sums, (WARPS, 8, 4)), axis=0)
    which = tl.arange(0, 4)[None, :]
    upper = tl.sum(tl.where(which == 0, sums, 0), axis=1)
    lower = tl.sum(tl.where(which == 1, sums, 0), axis=1)
    if NORM:
        r = tl.rsqrt(tl.sum(tl.where(which == 2, sums, 0)) / K + eps)
        upper, lower = upper * r, lower * r
    n = tile * (8 if GATED else 16) + tl.arange(0, 8)
    if GATED:
        y = upper / (1 + tl.exp(-upper)) * lower
        if ADD:
            y += tl.load(added_ptr + n, mask=n < N, other=0).to(tl.float32)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
    else:
        if ADD:
            upper += tl.load(added_ptr + n, mask=n < N, other=0).to(tl.float32)
            lower += tl.load(added_ptr + n + 8, mask=n + 8 < N, other=0).to(tl.float32)
        tl.store(y_ptr + n, upper.to(y_ptr.dtype.element_ty), mask=n < N)
        tl.store(y_ptr + n + 8, lower.to(y_ptr.dtype.element_ty), mask=n + 8 < N)


def _tiling(tiles: int, blocks: int) -> tuple[int, int]:
    """Choose warps of a program, and pieces that each loads together: the fastest on an H200."""
    if blocks <= 16:
        return (4, 4) if tiles > 132 else (16, 1)
    return 16, 3


def _arranged_matmul_triton(x, pieces, out_features, in_features, gated, eps, added, dtype):
    y = torch.empty(out_features, dtype=dtype, device=x.device)
    tiles, blocks = pieces.shape[:2]
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    to = y if added is None else added.contiguous()
    warps, each = _tiling(tiles, blocks)
    _arranged_matmul_kernel[(tiles,)](
        x.view(torch.int64), pieces.view(torch.int64), to, y,
        out_features, in_features, blocks, 0.0 if eps is None else eps,
        NORM=eps is not None, GATED=gated, ADD=added is not None,
        WARPS=warps, EACH=each, ROUNDS=triton.cdiv(blocks, warps * each),
        WHOLE=(blocks - 1) // warps, SQUARES=triton.cdiv(in_features, 128 * warps), PTX=HAS_PTX,
        num_warps=warps, **overlap_options(x),
    )  # fmt: skip
    return y


def arranged_matmul(
    x: Tensor,
    weight: Arranged,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise a row, multiply it by an arranged matrix, gate the result and add to it.

    Args:
        x: (K,) bfloat16, contiguous, K a multiple of 8.
        weight: the matrix, and whether the result is gated.
        eps: added to the mean square; None leaves the norm out.
        added: like the result; None leaves the sum out.
        dtype: of the result, bfloat16 or float32; by default that of `x`.

    Returns:
        (N,) in `dtype`, accumulated in float32 and rounded once.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    dtype = dtype or x.dtype
    got = f"{x.dtype} of shape {tuple(x.shape)}"
    if x.dtype != torch.bfloat16 or x.shape != (weight.in_features,) or not x.is_contiguous():
        raise ValueError(f"need {weight.in_features} contiguous bfloat16 elements, got {got}")
    if len(x) % 8:
        raise ValueError(f"need a multiple of 8 elements, got {got}")
    if added is not None and (added.dtype, added.shape) != (dtype, (weight.out_features,)):
        got = f"{added.dtype} {tuple(added.shape)}"
        raise ValueError(f"need {dtype} {(weight.out_features,)} to add to, got {got}")
    run = _arranged_matmul_triton if uses_triton(x) else _arranged_matmul_torch
    return run(x, *weight, eps, added, dtype)


SHAPES = (
    (1, 8, 32, False, 0.1, False), (34, 1000, 32, True, 1e-6, True),
    (17, 328, 96, False, 1e-6, True), (20, 3288, 32, False, 1e-6, False),
    (48, 2720, 32, True, None, False),
)  # fmt: skip
"""(rows, K, G, gated, eps, whether something is added)."""


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for rows, in_features, group_size, gated, eps, adds in SHAPES:
        state = random_packed(rows, in_features, group_size, generator, spread=8)
        weight = arrange(*state, in_features, group_size, gated)
        x = torch.randn(in_features, generator=generator)
        x *= 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)
        added = torch.randn(weight.out_features, generator=generator)
        for dtype in dtypes:  # bf16 results have a coarser gate
            low = dtype == torch.bfloat16
            label = f"{rows}x{in_features}{' gate' * gated}{' norm' * (eps is not None)}"
            yield Case(
                f"{label}{' sum' * adds} {str(dtype).removeprefix('torch.')}",
                (x.to(device, torch.bfloat16), weight.pieces.to(device), *weight[1:], eps,
                 added.to(device, dtype) if adds else None, dtype),
                peer=_arranged_matmul_torch if low else None,
            )  # fmt: skip


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    half = {"device": device, "dtype": torch.bfloat16}
    for rows, in_features, gated in ((11264, 2048, True), (2048, 5632, False)):
        state = random_packed(rows, in_features, 32, generator, spread=8)
        weight = arrange(*state, in_features, 32, gated)
        x, added = torch.randn(in_features, **half), torch.randn(weight.out_features, **half)
        yield Timing(
            f"1x{rows}x{in_features}{' gate' * gated}",
            (x, *weight, 1e-6, added, x.dtype),
            peer=partial(_with_torch, x, decode_weight(*state, in_features, 32), gated, added),
            peer_name="torch and cuBLAS bf16",
            flops=2 * rows * in_features,
        )


def _with_torch(x: Tensor, weight: Tensor, gated: bool, added: Tensor) -> Tensor:
    """Do the same with dense weights, one operation at a time."""
    y = functional.linear(functional.rms_norm(x, x.shape, eps=1e-6), weight)
    if gated:
        gate, up = y.chunk(2)
        y = functional.silu(gate) * up
    return added + y


ARRANGED_MATMUL = KernelSpec(
    "arranged_matmul", _arranged_matmul_triton, _arranged_matmul_torch, arranged_matmul_reference,
    _cases,
    Gate(
        exact=False,
        relative=1e-5,
        peer_slack=0.1,
        reason="float32 sums of up to 3288 products; in bf16 one rounding, as torch's float32 has",
    ),
    timings=_timings,
)  # fmt: skip

"""How a matrix of trits is arranged for products of few rows, and what their kernels share.

The trits are arranged in pieces of 16 rows by 160 columns, stored in the order in which the threads
of a warp load them. Incomplete pieces are padded with zeros.

- 512 bytes of trits, five to a byte as `packing` says. For c in 0..3 and r in 0..7: bytes
  8 c .. 8 c + 7 of row r of the piece, then the same bytes of row r + 8.
- 160 bytes of scales, bf16, each halved. For r in 0..7: digits 0, 1, 2, 3 of rows r and r + 8; then
  for r in 0..7: digit 4 of rows r and r + 8. Scales of even digits are negative, because
  `take_digits` gives -2 T for even digits and 2 T for odd ones.

If the result is gated, row r + 8 of a piece is the row of w half a matrix below row r, so that one
thread has both inputs of the gate. Thread 4 r + c of a warp multiplies bytes 8 c .. 8 c + 7 of rows
r and r + 8, as in `few_rows`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import PLANE, pack_trits, unpack_trits, unpack_trits_torch
from arbcli.kernels.codec.scales import scales_torch
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import uses_triton
from arbcli.kernels.runtime.shared_memory import (
    copy,
    read,
    read_four,
)

BLOCK = 5 * PLANE
"""Weights of a row in a piece."""
ROWS = 16
"""Rows of a piece."""
TRIT_BYTES, SCALE_BYTES = 512, 160
"""Of a piece."""
MOST_ROWS = 8
"""Largest M: what one instruction multiplies."""
SHARED_BYTES = 47 << 10
"""That a program can have, but for what sums over its threads take."""
PIECE_BYTES = tl.constexpr(TRIT_BYTES + SCALE_BYTES)
SCALES_AT = tl.constexpr(TRIT_BYTES)
"""Bytes of a piece, and where its scales are."""


class Arranged(NamedTuple):
    """A matrix in pieces: T tiles of 16 rows by B blocks of 160 columns."""

    pieces: Tensor
    """(T, B, 672) uint8: (4, 8, 2, 8) bytes, then (8, 4, 2) and (8, 2) bfloat16 scales."""
    out_features: int
    """N: elements of a result, after gating."""
    in_features: int
    """K."""
    gated: bool
    """Whether a tile has eight rows of each half of the matrix."""


def arrange(packed: Packed, gated: bool = False) -> Arranged:
    """Arrange a packed matrix: 2.1 bits a weight, and what fills the last pieces.

    Args:
        packed: N rows by K weights, in groups of a multiple of 32.
        gated: whether results are to be gated; then N is even.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    check_trits(packed, gated)
    in_features, device, half = packed.in_features, packed.trits.device, packed.out_features // 2
    trits = unpack_trits(packed.trits, in_features)
    blocks = -(-in_features // BLOCK)
    group = torch.arange(5 * blocks, device=device) * PLANE // packed.group_size
    group = group.clamp(max=packed.num_groups - 1)
    scales = scales_torch(packed.exponent, packed.fraction)[:, group]
    halves = trits.view(2, half, -1) if gated else trits[None]
    of_halves = scales.view(2, half, -1) if gated else scales[None]
    rows = halves.shape[1]
    missing = -rows % (ROWS // 2 if gated else ROWS)
    halves = functional.pad(halves, (0, BLOCK * blocks - in_features, 0, missing))
    of_halves = functional.pad(of_halves, (0, 0, 0, missing))
    # to (tile, i, r, ...): i = 0 is row r of a tile, i = 1 row r + 8, or the gate's other input
    order = (1, 0, 2, 3, 4, 5) if gated else (0, 1, 2, 3, 4, 5)
    split = (2, -1, 8) if gated else (-1, 2, 8)
    pieces = pack_trits(halves.flatten(0, 1)).view(*split, blocks, 4, 8).permute(order)
    of_planes = of_halves.reshape(*split, blocks, 5).permute(order[:5])
    sign = torch.tensor([-0.5, 0.5, -0.5, 0.5, -0.5], device=device)
    pieces = pieces.permute(0, 3, 4, 2, 1, 5).flatten(2)
    of_planes = (of_planes * sign).permute(0, 3, 2, 4, 1).to(torch.bfloat16)
    first, last = (part.flatten(2).view(torch.uint8) for part in of_planes.split([4, 1], dim=3))
    pieces = torch.cat([pieces, first, last], dim=2)
    # a kernel that overlaps the one before it reads the pieces without waiting for any kernel
    if pieces.is_cuda:
        torch.cuda.synchronize(pieces.device)
    return Arranged(pieces, rows, in_features, gated)


def check_trits(packed: Packed, gated: bool) -> None:
    """Refuse what has no pieces: all digits, groups of less than planes, halves that are none.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    packed.check()
    if packed.remainder is not None:
        raise ValueError("weights of all digits are arranged by `arrange_digits`")
    if packed.group_size % PLANE:
        raise ValueError(f"need groups of whole planes of {PLANE} weights, got {packed.group_size}")
    if gated and packed.out_features % 2:
        raise ValueError(f"{packed.out_features} rows are not two halves")


def in_tiles(rows: Tensor, gated: bool) -> Tensor:
    """Split rows, padded with zeros, to (tiles, 2, 8, ...): those of the second eight behind."""
    halves = rows.unflatten(0, (2, -1)) if gated else rows[None]
    missing = -halves.shape[1] % (8 if gated else ROWS)
    halves = functional.pad(halves, (*(0, 0) * (halves.dim() - 2), 0, missing))
    if gated:
        return halves.unflatten(1, (-1, 8)).transpose(0, 1)
    return halves[0].unflatten(0, (-1, 2, 8))


def fits_arranged(x: Tensor, group_size: int) -> bool:
    """Whether a step should arrange its weights: bf16, kernels, groups of whole planes.

    Args:
        x: the stream, (B, 1, K) of one position of each text.
        group_size: of the weights.
    """
    step = x.dtype == torch.bfloat16 and x.shape[1] == 1 and x.shape[2] % 8 == 0
    return step and uses_triton(x) and group_size % PLANE == 0 and torch.version.hip is None


def decode_arranged(pieces: Tensor) -> Tensor:
    """Decode an arranged matrix: (16 T, 160 B) float32, in the order of its tiles."""
    blocks = pieces.shape[1]
    trits, scales = pieces.split([TRIT_BYTES, SCALE_BYTES], dim=2)
    scales = scales.contiguous().view(torch.bfloat16).unflatten(2, (40, 2))
    scales = torch.cat([scales[:, :, :32].unflatten(2, (8, 4)), scales[:, :, 32:, None]], dim=3)
    packed = trits.unflatten(2, (4, 8, 2, 8)).permute(0, 4, 3, 1, 2, 5)
    weight = unpack_trits_torch(
        packed.reshape(ROWS * len(pieces), -1), BLOCK * blocks, torch.float32
    )
    sign = torch.tensor([-2.0, 2.0, -2.0, 2.0, -2.0], device=pieces.device)
    of_planes = scales.permute(0, 4, 2, 1, 3).float() * sign
    return (weight.unflatten(1, (-1, PLANE)) * of_planes.reshape(len(weight), -1, 1)).flatten(1)


@triton.jit
def copy_pieces(starts, slot, block, blocks):
    """Start copying the next piece of each tile, that of `block`, to shared memory."""
    UNITS: tl.constexpr = PIECE_BYTES // 16
    lane = tl.arange(0, block.shape[0]) % 32
    left = PIECE_BYTES // 16 * (blocks - block) - lane
    for i in tl.static_range(len(starts)):
        source = (starts[i] + (PIECE_BYTES // 8 * block + 2 * lane)).to(tl.int64)
        target = slot + 16 * (UNITS * i + lane)
        for j in tl.static_range(0, UNITS, 32):
            copy(target + 16 * j, source + 16 * j, left > j, lane + j < UNITS, False)


@triton.jit
def split_word(word):
    """Split an int64 into two int32."""
    return word.to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def read_unit(pointer, address, PTX: tl.constexpr):
    """Read a thread's eight bytes of rows r and r + 8: four int32."""
    if PTX:
        return read_four(address)
    return split_word(tl.load(pointer)) + split_word(tl.load(pointer + 1))


@triton.jit
def read_scales(piece, r, address, last_address, PTX: tl.constexpr):
    """Read the scales of rows r and r + 8, a pair a digit."""
    if PTX:
        return read_four(address) + (read(last_address),)  # noqa: RUF005
    word, pairs = (piece + SCALES_AT // 8).to(tl.pointer_type(tl.int32)), ()
    for digit in tl.static_range(5):
        pairs = pairs + (tl.load(word + (4 * r + digit if digit < 4 else 32 + r)),)  # noqa: RUF005
    return pairs


@triton.jit
def over_parts(value, THREADS: tl.constexpr, PARTS: tl.constexpr):
    """Split each `THREADS` threads into `PARTS` parts, sum over these, and give all the sum."""
    if PARTS == 1:
        return value
    shape: tl.constexpr = (value.shape[0] // THREADS, PARTS, THREADS // PARTS)
    total = tl.sum(tl.reshape(value, shape), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, shape), value.shape)


@triton.jit
def as_words(four):
    """Read four float32 as int32, bit by bit."""
    words = ()
    for i in tl.static_range(4):
        words = words + (four[i].to(tl.int32, bitcast=True),)  # noqa: RUF005
    return words


@triton.jit
def _store(y, added_ptr, y_ptr, at, mask, ADD: tl.constexpr):
    if ADD:
        y += tl.load(added_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_both(
    upper, lower, added_ptr, y_ptr, m, n, N, mask, GATED: tl.constexpr, ADD: tl.constexpr
):
    """Store the results of rows r and r + 8 of a tile: one if they are gated, else two."""
    at = m * N + n
    if GATED:
        _store(upper / (1 + tl.exp(-upper)) * lower, added_ptr, y_ptr, at, mask & (n < N), ADD)
    else:
        _store(upper, added_ptr, y_ptr, at, mask & (n < N), ADD)
        _store(lower, added_ptr, y_ptr, at + 8, mask & (n + 8 < N), ADD)


def grid_of(weight: NamedTuple, block: int) -> tuple[int, int]:
    """Count the tiles of a laid out matrix, and its blocks of so many columns."""
    return -(-weight.out_features // (ROWS // (1 + weight.gated))), -(-weight.in_features // block)


def check_few_rows(
    x: Tensor,
    in_features: int,
    added: Tensor | None,
    like: tuple[torch.dtype, int],
    multiple: int = 1,
    most: int = MOST_ROWS,
) -> None:
    """Refuse what cannot be multiplied as few rows, or added to the result.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to `most` rows.
        in_features: K.
        added: (M, N), or None.
        like: dtype and N of the result.
        multiple: what K has to be one of.
        most: the largest M.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    got = f"{x.dtype} of shape {tuple(x.shape)}"
    fits = x.dim() == 2 and x.shape[1] == in_features and x.is_contiguous()
    if x.dtype != torch.bfloat16 or not fits:
        raise ValueError(f"need contiguous bfloat16 rows of {in_features}, got {got}")
    if not 1 <= len(x) <= most or in_features % multiple:
        of = f" of a multiple of {multiple} elements" if multiple > 1 else ""
        rows = "a row" if most == 1 else f"1 to {most} rows"
        raise ValueError(f"need {rows}{of}, got {got}")
    dtype, shape = like[0], (len(x), like[1])
    if added is not None and (added.dtype, added.shape) != (dtype, shape):
        got = f"{added.dtype} {tuple(added.shape)}"
        raise ValueError(f"need {dtype} {shape} to add to, got {got}")


def tiles_reference(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    gated: bool,
    eps: float | None,
    added: Tensor | None,
) -> Tensor:
    """Normalise rows, multiply, gate and add in float64, by a decoded (T, 2, 8, K) matrix."""
    x = x.double()
    if eps is not None:
        x = x / ((x * x).sum(1, keepdim=True) / x.shape[1] + eps) ** 0.5
    y = torch.einsum("thrk,mk->mthr", weight, x)
    if gated:
        y = y[:, :, 0] / (1 + torch.exp(-y[:, :, 0])) * y[:, :, 1]
    y = y.flatten(1)[:, :out_features]
    return y if added is None else added.double() + y


def with_torch(x: Tensor, weight: Tensor, gated: bool, added: Tensor) -> Tensor:
    """Do the same with dense weights, one operation at a time."""
    y = functional.linear(functional.rms_norm(x, x.shape[1:], eps=1e-6), weight)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    return added + y

"""Prepacked layout of a trit matrix for products of few rows: two bits per weight.

Trits T are stored as T + 1 in two bits, four per byte, in pieces of 16 rows by 128 columns. Pieces
are stored in the order in which the threads of a warp load them. Plane i of a piece, its columns
32 i .. 32 i + 31, is in bits 2 i and 2 i + 1 of each byte.

- 512 bytes of codes. For j in 0..3, r in 0..7 and q in 0..1: bytes 8 j + 4 q .. 8 j + 4 q + 3 of
  row r of the piece, then the same bytes of row r + 8. The first of four bytes has columns
  32 i, the next 2 + 32 i, then 1 + 32 i and 3 + 32 i: every second one is a neighbour.
- 128 bytes of scales, bf16. For r in 0..7: those of planes 0, 1, 2, 3 of row r, then of row r + 8.

A piece of 640 bytes; thread 4 r + c loads the 16 bytes of j = c and row r:

    byte 0         16                     112       128                       512        640
         | j=0 r=0 | j=0 r=1 | ... | j=0 r=7 | j=1, r=0..7 | j=2 | j=3 | scales r=0..7 |
           | q=0: row r, row r + 8 | q=1: row r, row r + 8 |     four bytes each, 4 planes a byte

Reason: a thread loads its columns 8 c .. 8 c + 7 of four planes, of rows r and r + 8, with one load
    of 16 bytes, and eight threads with the same c load 128 contiguous bytes. Codes have two bits,
    not 1.6, because one mask extracts a code, while base-3 digits are extracted one after another.
    Every second column is adjacent, so one mask leaves two codes in the two halves of a word.

Codes beyond K are 0, scales beyond K repeat the last group, and rows beyond N are all 0. If the
result is gated, row r + 8 of a piece is the row of w half a matrix below row r.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed, scales_torch
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.matmul import swizzled
from arbcli.kernels.runtime._triton import tl
from arbcli.kernels.runtime.arguments import compiled_check, declared
from arbcli.kernels.runtime.backend import backend_of

BLOCK = 4 * PLANE
"""Number of columns per piece."""
CODE_BYTES, SCALE_BYTES = 512, 128
"""Sizes of a piece's codes and scales in bytes."""
COLUMNS = [0, 2, 1, 3]
"""Column offsets of the bytes of a word, and byte offsets of columns."""
PREPACKED_AT_ONCE = 1 << 22
"""Weights that are prepacked at a time; each needs about 30 bytes of temporary memory."""
MAX_COLUMNS = 17_920
"""Largest K of `row_matmul`: more columns of x do not fit in a GPU's shared memory."""
PIECE_BYTES = tl.constexpr(CODE_BYTES + SCALE_BYTES)


class Prepacked(NamedTuple):
    """A prepacked matrix: T tiles of 16 rows by B blocks of 128 columns."""

    pieces: Tensor
    """(T, B, 640) uint8: (4, 8, 2, 2, 4) bytes, then (8, 2, 4) bfloat16 scales."""
    out_features: int
    """N, the width of the result, after gating."""
    in_features: int
    """K, the number of columns."""
    gated: bool
    """Whether a tile has eight rows of each half of the matrix."""


PREPACKED_SCHEMA = swizzled.few_rows_of(
    f"pieces: uint8[{swizzled.tiles_by(BLOCK)}, {PIECE_BYTES.value}] dense"
)

check_on_cpu = compiled_check(
    "multiply_on_cpu", declared(PREPACKED_SCHEMA), swizzled.few_rows_fit(1 << 31)
)


def prepack(packed: Packed, gated: bool = False) -> Prepacked:
    """Prepack a matrix for products of few rows: 2.5 bits per weight, plus padding.

    Args:
        packed: N rows by K weights, in groups of a multiple of 32.
        gated: whether results are gated; N is then even.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    swizzled.check_trits(packed, gated)
    halves = 1 + gated
    rows, height = packed.out_features // halves, swizzled.ROWS // halves
    tiles, blocks = -(-rows // height), -(-packed.in_features // BLOCK)
    shape, device = (tiles, blocks, CODE_BYTES + SCALE_BYTES), packed.trits.device
    pieces = torch.empty(shape, dtype=torch.uint8, device=device)
    if backend_of(packed.trits) == "native":
        swizzled.arrange_native(packed, pieces, None, gated)
        return Prepacked(pieces, rows, packed.in_features, gated)
    limit = max(1, PREPACKED_AT_ONCE // (swizzled.ROWS * BLOCK * blocks))
    for start in range(0, tiles, limit):
        index = torch.arange(height * start, min(height * (start + limit), rows), device=device)
        index = torch.cat([index + rows * half for half in range(halves)])
        pieces[start : start + limit] = _pieces(packed.rows(index), gated, blocks)
    # a kernel that overlaps the one before it reads the pieces without waiting for any kernel
    if pieces.is_cuda:
        torch.cuda.synchronize(device)
    return Prepacked(pieces, rows, packed.in_features, gated)


def _pieces(packed: Packed, gated: bool, blocks: int) -> Tensor:
    """Prepack rows, or equal numbers of rows of both halves, to (tiles, blocks, 640) bytes."""
    device = packed.trits.device
    group = torch.arange(4 * blocks, device=device) * PLANE // packed.group_size
    scales = scales_torch(packed.exponent, packed.fraction)
    scales = scales[:, group.clamp(max=packed.num_groups - 1)].bfloat16()
    codes = unpack_trits(packed.trits, packed.in_features).to(torch.uint8) + 1
    codes = functional.pad(codes, (0, BLOCK * blocks - packed.in_features))
    # tile, half, row, block, plane i, j, q, byte
    codes = swizzled.split_tiles(codes.unflatten(1, (blocks, 4, 4, 2, 4)), gated)[..., COLUMNS]
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=device).view(4, 1, 1, 1)
    codes = (codes << shift).sum(4, dtype=torch.uint8).permute(0, 3, 4, 2, 5, 1, 6)
    scales = swizzled.split_tiles(scales.unflatten(1, (blocks, 4)), gated).permute(0, 3, 2, 1, 4)
    return torch.cat([codes.flatten(2), scales.flatten(2).view(torch.uint8)], dim=2)


def multiply_on_cpu(
    x: Tensor, weight: Prepacked, eps: float | None = None, added: Tensor | None = None
) -> Tensor:
    """Compute `row_matmul` of any number of rows with the native loop.

    Args:
        x: (M, K) bfloat16 or float32, contiguous, K a multiple of 8.
        weight: the prepacked matrix.
        eps: added to the mean square; None omits the norm.
        added: like the result, (M, N); None omits the sum.

    Returns:
        (M, N) in the dtype of `x`.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    inputs = x, *weight, eps, added, x.dtype
    check_on_cpu(*inputs)
    return prepacked_native(*inputs)


def decode_prepacked(pieces: Tensor) -> Tensor:
    """Decode a prepacked matrix: (16 T, 128 B) float32, in the order of its tiles."""
    codes, scales = pieces.split([CODE_BYTES, SCALE_BYTES], dim=2)
    codes = codes.unflatten(2, (4, 8, 2, 2, 4))
    planes = torch.stack([codes >> 2 * i & 3 for i in range(4)], dim=2)[..., COLUMNS].float() - 1
    scales = scales.contiguous().view(torch.bfloat16).unflatten(2, (8, 2, 4)).float()
    # tile, half, row, block, plane i, j, q, byte
    weight = planes.permute(0, 6, 4, 1, 2, 3, 5, 7)
    weight = weight * scales.permute(0, 3, 2, 1, 4)[..., None, None, None]
    return weight.reshape(swizzled.ROWS * len(pieces), -1)


def prepacked_torch(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `row_matmul` and `prepacked_rows` with torch, in float32."""
    weight = decode_prepacked(pieces)[:, :in_features]
    return swizzled.rows_torch(x, weight, out_features, gated, eps, added, dtype)


def prepacked_native(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `row_matmul` and `prepacked_rows` with the native loop."""
    return swizzled.multiply_native(x, pieces, None, out_features, gated, eps, added, dtype)

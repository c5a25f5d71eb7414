"""Product of few rows with int8 weights: y = added + gate(rms_norm(x) @ w.T).

A weight is z * scale. The kernel rounds it to bf16, which matrix units multiply, as `decode_weight`
does; the native loop multiplies z by x as integers, and rounds no weight. Norm, gate and sum are
optional; the division of the norm is applied last, to the products.

Layout. The matrix is prepacked in pieces of 16 rows by a plane of 32 weights, one byte per weight:
the sign, and a magnitude of seven bits. Thread 4 r + c of a warp has 16 bytes: weights
8 c .. 8 c + 7 of row r of a piece, then of row r + 8. If the result is gated, row r + 8 of a piece
is the row half a matrix below row r. Scales, divided by the unit of z, are bf16, one per row and
piece. Incomplete pieces are padded with zeros. The total is 1.06 bytes per weight.

    a piece, 512 bytes:   thread 4 r + c has 16:  | row r: 8 c .. 8 c + 7 | row r + 8: the same |
    a byte:               | below 0 | magnitude of z, 7 bits |

Reason: a thread loads its weights of a plane with one load of 16 bytes, in the order of
`warp_products`, and a warp loads 512 contiguous bytes. Sign and magnitude replace a signed byte
because 128 + m is a bf16 number that contains the bits of m, so no conversion is needed.

Work. The pieces of 16 rows are divided among the warps of a program, which multiply them by all
rows of x with the instruction of `warp_products`; rows of x beyond M are 0. A magnitude m is
inserted into the last bits of the bf16 number 128 + m, and one multiply-add computes (128 + m) *
scale - 128 * scale, which is m * scale rounded once.
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import digits_torch, round_weight
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.scales import scales_torch
from arbcli.kernels.codec.warp_products import HAS_PTX, add_products, pair, unpair
from arbcli.kernels.matmul.swizzled import (
    MOST_ROWS,
    ROWS,
    arrange_native,
    few_rows_fit,
    few_rows_of,
    grid_of,
    in_tiles,
    multiply_native,
    store_both,
    tiles_by,
    tiles_torch,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import (
    BF16,
    INT8,
    UINT8,
    Array,
    Matrix,
    Number,
    compiled_check,
)
from arbcli.kernels.runtime.backend import num_processors, uses_native
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.threads import load_where

LARGEST_Z = 127
SIGN = 128
"""Sign bit of a code, set if z is below 0."""
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


class PrepackedInt8(NamedTuple):
    """A prepacked matrix: T tiles of 16 rows by P planes."""

    pieces: Tensor
    """(T, P, 8, 4, 2, 8) uint8: magnitudes of z, plus 128 if z is negative."""
    scales: Tensor
    """(T, P, 8, 2) bfloat16."""
    out_features: int
    """N, the width of the result; half of the rows of the matrix if it is gated."""
    in_features: int
    """K, the number of columns."""
    gated: bool
    """Whether a tile has eight rows of each half of the matrix."""


def prepack_int8(packed: Packed, gated: bool = False) -> PrepackedInt8:
    """Prepack a matrix of int8 weights.

    Args:
        packed: N rows by K weights, in groups of a multiple of 32.
        gated: whether results are gated; N is then even.

    Raises:
        ValueError: a dtype or a shape does not fit, or |z| exceeds 127.
    """
    _check_int8(packed, gated)
    rows, in_features = packed.out_features, packed.in_features
    planes = -(-in_features // PLANE)
    codes = torch.zeros(rows, planes * PLANE, dtype=torch.uint8, device=packed.trits.device)
    most = max(1, (1 << 26) // max(1, in_features))
    for start in range(0, rows, most):
        part = slice(start, min(start + most, rows))
        z = digits_torch(packed, torch.float32, part).mul_(packed.unit)
        magnitude = z.abs()
        _check_bytes(bool(magnitude.amax() > LARGEST_Z))
        codes[part, :in_features] = magnitude.add_(SIGN * (z < 0)).to(torch.uint8)
    group = torch.arange(planes, device=codes.device) * PLANE // packed.group_size
    scales = scales_torch(packed.exponent, packed.fraction)[:, group] / packed.unit
    pieces = in_tiles(codes.unflatten(1, (planes, 4, 8)), gated).permute(0, 3, 2, 4, 1, 5)
    scales = in_tiles(scales.bfloat16(), gated).permute(0, 3, 2, 1)
    pieces, scales = pieces.contiguous(), scales.contiguous()
    # a kernel that overlaps the one before it reads them without waiting for any kernel
    if pieces.is_cuda:
        torch.cuda.synchronize(pieces.device)
    return PrepackedInt8(pieces, scales, rows // (1 + gated), in_features, gated)


def prepack_in_lanes(packed: Packed, gated: bool = False) -> PrepackedInt8:
    """Compute `in_lanes` of `prepack_int8` with the native loop."""
    _check_int8(packed, gated)
    rows = packed.out_features // (1 + gated)
    grid, device = grid_of(rows, packed.in_features, gated, PLANE), packed.trits.device
    pieces = torch.empty(*grid, PLANE // 2, ROWS, 2, dtype=torch.int8, device=device)
    scales = torch.empty(*grid, 8, 2, dtype=torch.bfloat16, device=device)
    _check_bytes(bool(arrange_native(packed, pieces, scales, gated)))
    return PrepackedInt8(pieces, scales, rows, packed.in_features, gated)


def _check_bytes(beyond: bool) -> None:
    if beyond:
        raise ValueError(f"z is beyond {LARGEST_Z}, which a byte holds")


_check_int8 = compiled_check(
    "packed weights",
    {"packed": Matrix("N, K, G"), "gated": Number()},
    ("packed.remainder is not None", f"G % {PLANE} == 0", "not gated or N % 2 == 0"),
)


def in_lanes(weight: PrepackedInt8) -> PrepackedInt8:
    """Permute pieces for the native loop: (T, P, 16, 16, 2) int8, z of 16 rows by two columns."""
    if weight.pieces.dtype == torch.int8:
        return weight
    magnitude = (weight.pieces & ~SIGN).view(torch.int8)
    z = torch.where(weight.pieces >= SIGN, -magnitude, magnitude)
    z = z.unflatten(5, (4, 2)).permute(0, 1, 3, 5, 4, 2, 6)
    return weight._replace(pieces=z.reshape(*z.shape[:2], PLANE // 2, ROWS, 2))


def _int8_matmul_torch(
    x: Tensor, pieces: Tensor, scales: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight = _weights_in_float32(pieces, scales)[:, :in_features]
    return tiles_torch(x, weight, out_features, gated, eps, added, dtype)


def _weights_in_float32(pieces: Tensor, scales: Tensor) -> Tensor:
    """Decode a prepacked matrix: (16 T, 32 P), in the order of its tiles, without rounding."""
    z = (pieces & ~SIGN).float()
    z[pieces >= SIGN] *= -1
    weight = z * scales.float()[:, :, :, None, :, None]
    return weight.permute(0, 4, 2, 1, 3, 5).flatten(3).flatten(0, 2)


def _int8_matmul_native(
    x: Tensor, pieces: Tensor, scales: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight = in_lanes(PrepackedInt8(pieces, scales, out_features, in_features, gated))
    return multiply_native(x, weight.pieces, scales, out_features, gated, eps, added, dtype)


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
    of_row, _ = unpair(scale)
    a, b = _weight(word, of_row), _weight(word >> 8, of_row)
    c, d = _weight(word >> 16, of_row), _weight(word >> 24, of_row)
    return pair(a, b), pair(c, d)


@triton.jit
def _weight(code, scale):
    magnitude = round_weight((code & 0x7F).to(tl.float32) * scale, 1)
    return tl.where((code & 0x80) == 0, magnitude, -magnitude)


@triton.jit
def _load_pieces(
    pieces, scales, plane, planes, WARPS: tl.constexpr, DEPTH: tl.constexpr, PTX: tl.constexpr
):
    """Load a thread's words and scales of `DEPTH` pieces, `WARPS` pieces apart."""
    words, of_rows = (), ()
    for i in tl.static_range(DEPTH):
        at = plane + WARPS * i
        some = at < planes
        words = words + (load_where(pieces + 512 * at, some, True, PTX),)  # noqa: RUF005
        of_row = (scales + 32 * at).to(tl.pointer_type(tl.int32))
        of_rows = of_rows + (tl.load(of_row, mask=some, other=0),)  # noqa: RUF005
    return words, of_rows


@triton.jit
def _over_warps(value, WARPS: tl.constexpr):
    return tl.sum(tl.reshape(value, (WARPS, 32)), axis=0)


@triton.jit(do_not_specialize=["N"])
@no_type_check
def _int8_matmul_kernel(
    x_ptr, pieces_ptr, scales_ptr, added_ptr, y_ptr,
    N, K, planes, eps,
    M: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    WARPS: tl.constexpr, DEPTH: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS)
    r, c = thread // 4 % 8, thread % 4
    zero = tl.zeros(thread.shape, tl.float32)
    tile = tl.program_id(0).to(tl.int64)
    pieces = pieces_ptr + (tile * planes * 512 + 16 * (thread % 32))  # in bytes
    scales = scales_ptr + (tile * planes * 32 + 4 * r)
    plane = thread // 32
    words, of_rows = _load_pieces(pieces, scales, plane, planes, WARPS, DEPTH, PTX)
    wait_for_last(OVERLAP)
    x_row = x_ptr + (tl.minimum(r, M - 1) * K + 8 * c)
    sums, squares = (zero, zero, zero, zero), zero
    for _ in range(0, planes, WARPS * DEPTH):
        # prefetch the next pieces while these are multiplied
        later = plane + WARPS * DEPTH
        next_words, next_of_rows = _load_pieces(pieces, scales, later, planes, WARPS, DEPTH, PTX)
        for i in tl.static_range(DEPTH):
            k = 32 * (plane + WARPS * i)
            some = (k + 8 * c < K) & (r < M)
            x = load_where(x_row + k, some, True, PTX)
            pairs = ()
            for row in tl.static_range(2):
                bits = (of_rows[i] >> (16 * row)) & 0xFFFF
                scale, offset = _pair_of_scales(bits, PTX)
                for word in tl.static_range(2):
                    pairs = pairs + _weights(words[i][2 * row + word], scale, offset, PTX)
            sums = add_products(sums, pairs, x, PTX)
            if NORM:
                for j in tl.static_range(4):
                    low, high = unpair(x[j])
                    squares += low * low + high * high
        words, of_rows, plane = next_words, next_of_rows, later

    lane = tl.arange(0, 32)
    row_of_x, n = lane % 4, tile * (8 if GATED else 16) + lane // 4
    for i in tl.static_range(1 if M == 1 else 2):
        m = (1 if M == 1 else 2) * row_of_x + i
        scale = tl.full(m.shape, 1.0, tl.float32)
        for row in tl.static_range(M if NORM else 0):
            of_x = tl.sum(tl.where(r == row, squares, 0))
            scale = tl.where(m == row, tl.rsqrt(of_x / K + eps), scale)
        upper = _over_warps(sums[i], WARPS) * scale
        lower = _over_warps(sums[2 + i], WARPS) * scale
        store_both(upper, lower, added_ptr, y_ptr, m, n, N, m < M, GATED, ADD)


ROWS_ALIKE = 4
"""Number of rows up to which the bits of a row do not depend on the other rows."""


class Tiling(NamedTuple):
    """Partition of the work of a tile."""

    warps: int
    """Number of warps per program; the planes are divided among them."""
    depth: int
    """Number of pieces that a warp loads at a time."""


def _tiling(rows: int, tiles: int, planes: int, processors: int) -> Tiling:
    """Choose the tiling that was fastest on an H200 with overlapping kernels."""
    if tiles <= processors and planes >= 64:
        return Tiling(16, 4)
    if planes >= 128:
        return Tiling(8 if rows <= ROWS_ALIKE else 4, 8)
    return Tiling(8 if planes >= 32 else 4, 4)


def _int8_matmul_triton(
    x: Tensor, pieces: Tensor, scales: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    y = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    to = y if added is None else added.contiguous()
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    tiles, planes = pieces.shape[:2]
    warps, depth = _tiling(len(x), tiles, planes, num_processors(x))
    _int8_matmul_kernel[(tiles,)](
        x, pieces, scales.view(torch.uint8), to, y,
        out_features, in_features, planes, 0.0 if eps is None else eps,
        M=len(x), NORM=eps is not None, GATED=gated, ADD=added is not None,
        WARPS=warps, DEPTH=depth, PTX=HAS_PTX, num_warps=warps, **overlap_options(x),
    )  # fmt: skip
    return y


def int8_matmul(
    x: Tensor, weight: PrepackedInt8, eps: float | None = None, added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Normalise rows, multiply by a prepacked matrix, gate the products and add `added`.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 8 rows, K a multiple of 8; on a CPU float32 too, and
            any number of rows.
        weight: the prepacked matrix; on a CPU, calling `in_lanes` once is faster than in every
            call.
        eps: added to the mean square; None omits the norm.
        added: like the result; None omits the sum.
        dtype: dtype of the result, bfloat16 or float32; the default is that of `x`.

    Returns:
        (M, N) in `dtype`, accumulated in float32 and rounded once.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    inputs = x, *weight, eps, added, dtype or x.dtype
    in_lanes = weight.pieces.dtype == torch.int8 and uses_native(x)
    (_check_lanes if in_lanes else INT8_MATMUL.check)(*inputs)
    return INT8_MATMUL.chosen(x)(*inputs)


_PLANES = tiles_by(PLANE)
_SCALES = Array(f"{_PLANES}, 8, 2", BF16, dense=True)
_WHERE = few_rows_fit(MOST_ROWS)

INT8_MATMUL = Operation(
    "int8_matmul", _int8_matmul_triton, _int8_matmul_torch,
    few_rows_of({"pieces": Array(f"{_PLANES}, 8, 4, 2, 8", UINT8, dense=True), "scales": _SCALES}),
    native=_int8_matmul_native, where=_WHERE,
)  # fmt: skip

_check_lanes = compiled_check(
    "int8_matmul",
    few_rows_of(
        {
            "pieces": Array(f"{_PLANES}, {PLANE // 2}, {ROWS}, 2", INT8, dense=True),
            "scales": _SCALES,
        }
    ),
    _WHERE,
)

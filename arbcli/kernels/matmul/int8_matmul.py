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
`ptx`, and a warp loads 512 contiguous bytes. Sign and magnitude replace a signed byte
because 128 + m is a bf16 number that contains the bits of m, so no conversion is needed.

The kernel is that of `prepacked_rows`, which differs for a block of four planes of int8 weights in
the copy to shared memory and in decoding. A magnitude m is inserted into the last bits of the bf16
number 128 + m, and one multiply-add computes (128 + m) * scale - 128 * scale, which is m * scale
rounded once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import digits_torch
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed, scales_torch
from arbcli.kernels.matmul import swizzled
from arbcli.kernels.matmul.prepacked_rows import MAX_TEXTS, multiply_prepacked
from arbcli.kernels.runtime.arguments import compiled_check, declared
from arbcli.kernels.runtime.backend import backend_of
from arbcli.kernels.runtime.operation import Operation

MAX_Z = 127
SIGN = 128
"""Sign bit of a code, set if z is below 0."""


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
    limit = max(1, (1 << 26) // max(1, in_features))
    for start in range(0, rows, limit):
        part = slice(start, min(start + limit, rows))
        z = digits_torch(packed, torch.float32, part).mul_(packed.unit)
        magnitude = z.abs()
        _check_bytes(bool(magnitude.amax() > MAX_Z))
        codes[part, :in_features] = magnitude.add_(SIGN * (z < 0)).to(torch.uint8)
    group = torch.arange(planes, device=codes.device) * PLANE // packed.group_size
    scales = scales_torch(packed.exponent, packed.fraction)[:, group] / packed.unit
    pieces = swizzled.split_tiles(codes.unflatten(1, (planes, 4, 8)), gated).permute(
        0, 3, 2, 4, 1, 5
    )
    scales = swizzled.split_tiles(scales.bfloat16(), gated).permute(0, 3, 2, 1)
    pieces, scales = pieces.contiguous(), scales.contiguous()
    # a kernel that overlaps the one before it reads them without waiting for any kernel
    if pieces.is_cuda:
        torch.cuda.synchronize(pieces.device)
    return PrepackedInt8(pieces, scales, rows // (1 + gated), in_features, gated)


def prepack_in_lanes(packed: Packed, gated: bool = False) -> PrepackedInt8:
    """Compute `permute_lanes` of `prepack_int8` with the native loop."""
    _check_int8(packed, gated)
    rows = packed.out_features // (1 + gated)
    grid, device = swizzled.grid_of(rows, packed.in_features, gated, PLANE), packed.trits.device
    pieces = torch.empty(*grid, PLANE // 2, swizzled.ROWS, 2, dtype=torch.int8, device=device)
    scales = torch.empty(*grid, 8, 2, dtype=torch.bfloat16, device=device)
    _check_bytes(bool(swizzled.arrange_native(packed, pieces, scales, gated)))
    return PrepackedInt8(pieces, scales, rows, packed.in_features, gated)


def _check_bytes(beyond: bool) -> None:
    if beyond:
        raise ValueError(f"z is beyond {MAX_Z}, which a byte holds")


_check_int8 = compiled_check(
    "packed weights",
    declared("packed: packed[N, K, G]; gated"),
    ("packed.remainder is not None", f"G % {PLANE} == 0", "not gated or N % 2 == 0"),
)


def permute_lanes(weight: PrepackedInt8) -> PrepackedInt8:
    """Permute pieces for the native loop: (T, P, 16, 16, 2) int8, z of 16 rows by two columns."""
    if weight.pieces.dtype == torch.int8:
        return weight
    magnitude = (weight.pieces & ~SIGN).view(torch.int8)
    z = torch.where(weight.pieces >= SIGN, -magnitude, magnitude)
    z = z.unflatten(5, (4, 2)).permute(0, 1, 3, 5, 4, 2, 6)
    return weight._replace(pieces=z.reshape(*z.shape[:2], PLANE // 2, swizzled.ROWS, 2))


def _int8_matmul_torch(
    x: Tensor, pieces: Tensor, scales: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight = _weights_in_float32(pieces, scales)[:, :in_features]
    return swizzled.rows_torch(x, weight, out_features, gated, eps, added, dtype)


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
    weight = permute_lanes(PrepackedInt8(pieces, scales, out_features, in_features, gated))
    return swizzled.multiply_native(
        x, weight.pieces, scales, out_features, gated, eps, added, dtype
    )


def int8_matmul(
    x: Tensor, weight: PrepackedInt8, eps: float | None = None, added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Normalise rows, multiply by a prepacked matrix, gate the products and add `added`.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 64 rows, K a multiple of 8; on a CPU float32 too, and
            any number of rows.
        weight: the prepacked matrix; on a CPU, calling `permute_lanes` once is faster than in every
            call.
        eps: added to the mean square; None omits the norm.
        added: like the result; None omits the sum.
        dtype: dtype of the result, bfloat16 or float32; the default is that of `x`.

    Returns:
        (M, N) in `dtype`, accumulated in float32 and rounded once. A row's bits do not depend on
        other rows, nor on M.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    inputs = x, *weight, eps, added, dtype or x.dtype
    is_native = weight.pieces.dtype == torch.int8 and backend_of(x) == "native"
    (_check_lanes if is_native else INT8_MATMUL.check)(*inputs)
    return INT8_MATMUL.chosen(x)(*inputs)


_PLANES = swizzled.tiles_by(PLANE)
_SCALES = f"scales: bfloat16[{_PLANES}, 8, 2] dense"
_WHERE = swizzled.few_rows_fit(MAX_TEXTS)

INT8_MATMUL = Operation(
    "int8_matmul", multiply_prepacked, _int8_matmul_torch,
    swizzled.few_rows_of(f"pieces: uint8[{_PLANES}, 8, 4, 2, 8] dense; {_SCALES}"),
    native=_int8_matmul_native, where=_WHERE,
)  # fmt: skip

_LANES = f"pieces: int8[{_PLANES}, {PLANE // 2}, {swizzled.ROWS}, 2] dense; {_SCALES}"
_check_lanes = compiled_check("int8_matmul", declared(swizzled.few_rows_of(_LANES)), _WHERE)

"""Shared code of products of few rows: argument checks, tiles of rows, and stores of results.

A matrix is prepacked for them, in tiles of 16 rows, with pieces in the order in which the threads
of a warp load them: see `prepacked` for trits, `int8_matmul` for int8 weights. If the result is
gated, row r + 8 of a tile is the row of w half a matrix below row r, so that one thread has both
inputs of the gate.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.decode_digits import native_arguments
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL, compiled_check, declared
from arbcli.kernels.runtime.backend import backend_of

ROWS = 16
"""Rows per piece."""
MAX_ROWS = 8
"""Largest M: the rows of x of one instruction."""

check_trits = compiled_check(
    "packed weights",
    declared("packed: packed[N, K, G]; gated"),
    ("packed.remainder is None", f"G % {PLANE} == 0", "not gated or N % 2 == 0"),
)
"""Check that a matrix can be prepacked: trits, groups of whole planes, even N if gated."""


def split_tiles(rows: Tensor, gated: bool) -> Tensor:
    """Split rows, padded with zeros, into (tiles, 2, 8, ...), two eights per tile."""
    halves = rows.unflatten(0, (2, -1)) if gated else rows[None]
    missing = -halves.shape[1] % (8 if gated else ROWS)
    halves = functional.pad(halves, (*(0, 0) * (halves.dim() - 2), 0, missing))
    if gated:
        return halves.unflatten(1, (-1, 8)).transpose(0, 1)
    return halves[0].unflatten(0, (-1, 2, 8))


def fits_prepacked(x: Tensor, group_size: int) -> bool:
    """Return whether weights should be prepacked: groups of whole planes, and a supported device.

    Args:
        x: the residual stream, (B, 1, K), one position of each text; on a CPU also (1, T, K),
            several positions of one text.
        group_size: number of weights per scale.
    """
    fits = x.shape[2] % 8 == 0 and group_size % PLANE == 0
    if backend_of(x) == "native":
        return fits and (len(x) == 1 or x.shape[1] == 1)
    step = x.dtype == torch.bfloat16 and x.shape[1] == 1
    return fits and step and backend_of(x) == "triton" and torch.version.hip is None


@triton.jit
def _store(y, added_ptr, y_ptr, at, mask, ADD: tl.constexpr):
    if ADD:
        y += tl.load(added_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_both(
    upper, lower, added_ptr, y_ptr, m, n, N, mask, GATED: tl.constexpr, ADD: tl.constexpr
):
    """Store the results of rows r and r + 8 of a tile: one if gated, otherwise two."""
    at = m * N + n
    if GATED:
        _store(upper / (1 + tl.exp(-upper)) * lower, added_ptr, y_ptr, at, mask & (n < N), ADD)
    else:
        _store(upper, added_ptr, y_ptr, at, mask & (n < N), ADD)
        _store(lower, added_ptr, y_ptr, at + 8, mask & (n + 8 < N), ADD)


def arrange_native(packed: Packed, pieces: Tensor, scales: Tensor | None, gated: bool) -> int:
    """Prepack a matrix with the native loop; return the number of z that do not fit in a byte.

    Args:
        packed: the matrix.
        pieces: output, (T, B, 640) uint8 for trits, or (T, P, 16, 16, 2) int8 for int8 weights.
        scales: output, (T, P, 8, 2) bfloat16, for int8 weights; None for trits.
        gated: whether a tile has eight rows of each half of the matrix.
    """
    rows, threads = packed.out_features, native.threads_for(pieces.numel())
    return native.call("arrange", *native_arguments(packed), pieces, scales, gated, rows, threads)


def multiply_native(
    x: Tensor, pieces: Tensor, scales: Tensor | None, out_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Normalise rows, multiply, gate and add with the native loop; `scales` is None for trits.

    A row's bits do not depend on other rows. x is rounded to 16 bits, with one power of two per 32
    elements.
    """
    (rows, in_features), blocks = x.shape, -(-x.shape[1] // 128)
    y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    threads = native.threads_for(out_features * in_features)
    size = (threads if rows == 1 else 1) * rows * (4 * 72 * blocks + 4)
    space = torch.empty(size, dtype=torch.uint8, device=x.device)
    added = None if added is None else added.contiguous()
    native.call(
        "multiply_rows", x, x.dtype == torch.bfloat16, pieces, scales, added, y,
        dtype == torch.bfloat16, gated, -1.0 if eps is None else eps, space,
        rows, out_features, in_features, threads,
    )  # fmt: skip
    return y


def grid_of(out_features: int, in_features: int, gated: bool, block: int) -> tuple[int, int]:
    """Compute the tiles of a prepacked matrix, and its number of blocks of `columns`."""
    return -(-out_features // (ROWS // (1 + gated))), -(-in_features // block)


def few_rows_of(pieces: str) -> str:
    """Declare the arguments: few rows, a prepacked matrix, and `added`."""
    return (
        f"x: any_real[M, in_features] dense; {pieces}; out_features; in_features; gated; eps; "
        "added: any_real[M, out_features]?; dtype"
    )


def few_rows_fit(limit: int) -> tuple[str, ...]:
    """Return the conditions on up to `limit` rows; on a CPU float32 and more rows are allowed."""
    return (
        "x.dtype == torch.bfloat16 or backend_of(x) == 'native'",
        "M == 1" if limit == 1 else f"M > 0 and (M <= {limit} or backend_of(x) == 'native')",
        "in_features % 8 == 0",
        DTYPE_IS_REAL,
        "added is None or added.dtype == dtype",
    )


def tiles_by(block: int) -> str:
    """Return expressions of the tiles and column blocks of a matrix: see `grid_of`."""
    return f"-(-out_features // ({ROWS} // (1 + gated))), -(-in_features // {block})"


def tiles_torch(
    x: Tensor, weight: Tensor, out_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Do the same with torch in float32, with a decoded (16 T, K) matrix, and round to `dtype`."""
    x = x.float()
    if eps is not None:
        x = functional.rms_norm(x, x.shape[1:], eps=eps)
    y = (x @ weight.T).view(len(x), -1, 2, 8)
    if gated:
        y = functional.silu(y[:, :, 0]) * y[:, :, 1]
    y = y.flatten(1)[:, :out_features]
    return (y if added is None else added + y).to(dtype)


def rows_torch(
    x: Tensor, weight: Tensor, out_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `tiles_torch` row by row, as rounding in a product depends on the number of rows."""
    results = [
        tiles_torch(
            x[m : m + 1], weight, out_features, gated, eps,
            None if added is None else added[m : m + 1], dtype
        )
        for m in range(len(x))
    ]  # fmt: skip
    return torch.cat(results)

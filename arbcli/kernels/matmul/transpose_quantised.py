"""Transpose e4m3 rows with a scale per row to an e4m3 matrix with one scale: x.T ~ q * scale.

FP8 products sum along contiguous elements with the scales outside of the sum. The gradient of a
weight sums over the rows of both its operands, so each is transposed, and its rows get the largest
of their scales. Scales are powers of two, so only numbers that move below 2**-6 are rounded again;
these are 2**-13 of the largest number or less.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import from_e4m3, to_e4m3
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton

BLOCK_M, BLOCK_D = 128, 64
"""Rows and columns of a program."""


def _prepare(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the result; compute factors of rows, (M, 1), and the shared scale, (1, 1)."""
    padded = -(-len(q) // MULTIPLE) * MULTIPLE
    shared = scale.amax().view(1, 1)
    factors = torch.where(shared.isfinite(), scale / shared, 0)
    return torch.empty(q.shape[1], padded, dtype=E4M3, device=q.device), factors, shared


def _transpose_quantised_torch(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    transposed, factors, shared = _prepare(q, scale)
    for rows in row_chunks(q):
        transposed[:, rows] = (q[rows].float() * factors[rows]).to(E4M3).T
    transposed.view(torch.uint8)[:, len(q) :] = 0
    return transposed, shared


@triton.jit
def _transpose_quantised_kernel(
    q_ptr, factor_ptr, transposed_ptr,
    M, D, padded,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_m, mask_d = offs_m < M, offs_d < D
    q_ptrs = q_ptr + offs_m[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_d[None, :], other=0)
    factor = tl.load(factor_ptr + offs_m, mask=mask_m, other=0)
    moved = to_e4m3(from_e4m3(q, NATIVE) * factor[:, None], NATIVE)
    # rows beyond the last are zeros, up to the padded length
    transposed_ptrs = transposed_ptr + offs_d[:, None] * padded + offs_m[None, :]
    tl.store(transposed_ptrs, tl.trans(moved), mask=mask_d[:, None] & (offs_m < padded)[None, :])


def _transpose_quantised_triton(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    transposed, factors, shared = _prepare(q, scale)
    width, padded = transposed.shape
    grid = triton.cdiv(padded, BLOCK_M), triton.cdiv(width, BLOCK_D)
    _transpose_quantised_kernel[grid](
        q.view(torch.uint8), factors, transposed.view(torch.uint8), len(q), width, padded,
        BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, NATIVE=has_e4m3(q), num_warps=4,
    )  # fmt: skip
    return transposed, shared


transpose_quantised = Operation(
    "transpose_quantised", _transpose_quantised_triton, _transpose_quantised_torch,
    "q: float8_e4m3fn[M, D] dense; scale: float32[M, 1] dense",
    where=("M > 0",),
)  # fmt: skip
"""Transpose quantised rows, and quantise them with a shared scale.

Args:
    q: (M, D) float8_e4m3fn, contiguous.
    scale: (M, 1) float32; `q` and `scale` are results of `quantise_rows`.

Returns:
    (D, M rounded up to a multiple of `MULTIPLE`) float8_e4m3fn, zeros beyond M; and its scale,
    (1, 1) float32, the largest of `scale`. It is NaN if one of these is, and all numbers are zero.
"""

"""Quantise the rows of a matrix to e4m3, with a power-of-two scale per row: x ~ q * scale.

e4m3 numbers have three mantissa bits from 2**-6 on; smaller ones are multiples of 2**-9, and the
largest is 448. The scale moves the largest magnitude of a row to 128..256, so elements of at least
2**-13 of it keep all three bits. Multiplication by a power of two is exact.
Source: P. Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import to_e4m3
from arbcli.kernels.norm.rms_norm import tile_at, tiling
from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.backend import capability, row_chunks
from arbcli.kernels.runtime.operation import Operation

E4M3 = torch.float8_e4m3fn
MAX_OCTAVE = 7
"""Octave to which the largest magnitude of a row is scaled."""
WHOLE_ROW = 16384
"""Largest row that a program keeps in registers, in columns."""


def _quantise_rows_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(len(x), 1, device=x.device)
    for rows in row_chunks(x):
        values = x[rows].float()
        largest = values.abs().amax(dim=1, keepdim=True)
        field = (largest.view(torch.int32) >> 23).clamp(min=8)
        scale[rows] = ((field - MAX_OCTAVE) << 23).view(torch.float32)
        inverse = ((254 + MAX_OCTAVE - field) << 23).view(torch.float32)
        q[rows] = (values * inverse).to(E4M3)
        scale[rows] = torch.where(largest < torch.inf, scale[rows], torch.nan)
    return q, scale


@triton.jit
def scales_of_largest(largest):
    """Build (scale, 1 / scale) of rows from their largest magnitudes; NaN if one is not finite."""
    field = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 8)
    scale = ((field - 7) << 23).to(tl.float32, bitcast=True)
    inverse = ((261 - field) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest < float("inf"), scale, float("nan")), inverse


@triton.jit
def largest_of_rows(x):
    """Compute the largest magnitude of each row of a float32 tile; NaN is larger than infinity."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)  # bits of magnitudes are ordered like the numbers
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def store_e4m3(q_ptr, scale_ptr, x, offs_m, offs_d, mask, M, D, NATIVE: tl.constexpr):
    """Quantise and store whole rows, [BLOCK_M, BLOCK_D] float32; `offs_m` is [BLOCK_M, 1]."""
    scale, inverse = scales_of_largest(largest_of_rows(x))
    tl.store(scale_ptr + offs_m, scale[:, None], mask=offs_m < M)
    q = to_e4m3(x * inverse[:, None], NATIVE)
    tl.store(q_ptr + offs_m * D + offs_d[None, :], q, mask=mask)


@triton.jit
def _quantise_rows_kernel(
    x_ptr, q_ptr, scale_ptr,
    M, D,
    stride_xm,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    x_ptrs = x_ptr + offs_m * stride_xm
    if WHOLE:
        offs_d, mask = tile_at(0, offs_m, M, D, BLOCK_D)
        x = tl.load(x_ptrs + offs_d[None, :], mask=mask, other=0).to(tl.float32)
        store_e4m3(q_ptr, scale_ptr, x, offs_m, offs_d, mask, M, D, NATIVE)
    else:
        largest = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            offs_d, mask = tile_at(start, offs_m, M, D, BLOCK_D)
            x = tl.load(x_ptrs + offs_d[None, :], mask=mask, other=0).to(tl.float32)
            further = largest_of_rows(x)
            largest = tl.maximum(largest, further, propagate_nan=tl.PropagateNan.ALL)
        scale, inverse = scales_of_largest(largest)
        tl.store(scale_ptr + offs_m, scale[:, None], mask=offs_m < M)
        for start in range(0, D, BLOCK_D):
            offs_d, mask = tile_at(start, offs_m, M, D, BLOCK_D)
            x = tl.load(x_ptrs + offs_d[None, :], mask=mask, other=0).to(tl.float32)
            q = to_e4m3(x * inverse[:, None], NATIVE)
            tl.store(q_ptr + offs_m * D + offs_d[None, :], q, mask=mask)


def has_e4m3(tensor: Tensor) -> bool:
    """Return whether a tensor's GPU, or the one compiled for, has conversions to e4m3."""
    return not INTERPRETED and capability(tensor) >= (8, 9)


def _quantise_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(rows, 1, device=x.device)
    if x.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        grid, tile = tiling(rows, columns, whole=WHOLE_ROW)
        _quantise_rows_kernel[grid](
            x, q.view(torch.uint8), scale, rows, columns, x.stride(0), NATIVE=has_e4m3(x), **tile
        )
    return q, scale


quantise_rows = Operation(
    "quantise_rows", _quantise_rows_triton, _quantise_rows_torch,
    "x: real[M, D]",
    where=("D > 0",),
)  # fmt: skip
"""Quantise rows to e4m3.

Args:
    x: (M, D) float32 or bfloat16, any strides, D at least 1.

Returns:
    (M, D) float8_e4m3fn q, and (M, 1) float32 powers of two: x ~ q * scale. The scale of a row
    that is not finite is NaN.
"""

"""Products with a packed matrix in FP8: both operands rounded to e4m3, accumulated in float32.

Activations and gradients have one scale per row, weights one per matrix; all are powers of two.
Trits are exact; the fraction of a group's scale is rounded to three bits. cuBLAS multiplies on GPUs
with FP8 (sm_89 or later); on others the same numbers are multiplied in float32.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_e4m3 import _decode_e4m3_torch, _decode_e4m3_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL
from arbcli.kernels.runtime.operation import Operation

MULTIPLE = 16
"""Required divisor of both sizes of a matrix, and of the summed dimension of FP8 products."""


def _fp8_matmul_torch(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    return _multiply(q, scale, *_decode_e4m3_torch(packed, transposed), dtype)


def _fp8_matmul_triton(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    return _multiply(q, scale, *_decode_e4m3_triton(packed, transposed), dtype)


def _multiply(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    if q.is_cuda and dtype == torch.bfloat16:
        return torch._scaled_mm(
            q, weight.T, scale, weight_scale, out_dtype=dtype, use_fast_accum=True
        )
    return ((q.float() @ weight.float().T) * (scale * weight_scale)).to(dtype)


fp8_matmul = Operation(
    "fp8_matmul", _fp8_matmul_triton, _fp8_matmul_torch,
    "q: float8_e4m3fn[M, N if transposed else K]; scale: float32[M, 1]; packed: packed[N, K]; "
    "transposed; dtype",
    where=(f"N % {MULTIPLE} == 0 and K % {MULTIPLE} == 0", DTYPE_IS_REAL),
)  # fmt: skip
"""Multiply activations by a packed matrix, or a gradient by its transpose, in FP8.

y = q * scale @ w.T, or q * scale @ w if `transposed`, with w rounded by `decode_e4m3`

Args:
    q: (M, K) float8_e4m3fn, contiguous; (M, N) if `transposed`.
    scale: (M, 1) float32; `q` and `scale` are results of `quantise_rows`.
    packed: w, N rows by K weights, both multiples of `MULTIPLE`.
    transposed: whether to compute q @ w, for a gradient.
    dtype: dtype of the result, bfloat16 or float32.

Returns:
    (M, N) in `dtype`; (M, K) if `transposed`. A row whose scale is NaN gives NaN.
"""

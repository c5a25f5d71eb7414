"""Gradients of weights in FP8: grad_w = grad_y.T @ x, both rounded to e4m3.

Each operand is transposed and has one scale: see `transpose_quantised`. Hopper accumulates FP8
products in 14 bits, too few for a sum over all tokens of a batch, so cuBLAS adds partial sums in
float32.
"""

import torch
from torch import Tensor

from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.kernels.matmul.transpose_quantised import (
    _transpose_quantised_torch,
    _transpose_quantised_triton,
)
from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL
from arbcli.kernels.runtime.operation import Operation


def _fp8_grad_w_torch(
    grad_q: Tensor, grad_scale: Tensor, q: Tensor, scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    transpose = _transpose_quantised_torch
    return _multiply(*transpose(grad_q, grad_scale), *transpose(q, scale), dtype)


def _fp8_grad_w_triton(
    grad_q: Tensor, grad_scale: Tensor, q: Tensor, scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    transpose = _transpose_quantised_triton
    return _multiply(*transpose(grad_q, grad_scale), *transpose(q, scale), dtype)


def _multiply(
    grad_q: Tensor, grad_scale: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    if q.is_cuda and dtype == torch.bfloat16:
        return torch._scaled_mm(grad_q, q.T, grad_scale, scale, out_dtype=dtype)
    return ((grad_q.float() @ q.float().T) * (grad_scale * scale)).to(dtype)


fp8_grad_w = Operation(
    "fp8_grad_w", _fp8_grad_w_triton, _fp8_grad_w_torch,
    "grad_q: float8_e4m3fn[M, N] dense; grad_scale: float32[M, 1] dense; "
    "q: float8_e4m3fn[M, K] dense; scale: float32[M, 1] dense; dtype",
    where=("M > 0", f"N % {MULTIPLE} == 0 and K % {MULTIPLE} == 0", DTYPE_IS_REAL),
)  # fmt: skip
"""Compute the gradient of a weight from quantised rows: (grad_q * grad_scale).T @ (q * scale).

Args:
    grad_q: (M, N) float8_e4m3fn, contiguous; N a multiple of `MULTIPLE`.
    grad_scale: (M, 1) float32.
    q: (M, K) float8_e4m3fn, contiguous; K a multiple of `MULTIPLE`.
    scale: (M, 1) float32. Both pairs are results of `quantise_rows`.
    dtype: dtype of the result, bfloat16 or float32.

Returns:
    (N, K) in `dtype`; NaN if a scale is.
"""

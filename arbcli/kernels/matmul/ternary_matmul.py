"""Products with a packed matrix: y = x @ w.T, and its gradient grad_x = grad_y @ w.

For up to `FUSED_ROWS` rows of x, packed bytes are decoded in registers: by `few_rows` if it
applies, otherwise by a general kernel for every dtype, stride and group size. With more rows, and
for gradients, the weights are decoded once to a temporary buffer and torch multiplies: decoding
them again for every tile of x would cost more. Weights that are all digits are always decoded
first.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits
from arbcli.kernels.codec.decode_weight import decode_weight_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import digit_of, plane_offsets
from arbcli.kernels.codec.scales import load_scale
from arbcli.kernels.matmul.few_rows import few_rows, fits_few_rows
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import Array, Matrix, Number
from arbcli.kernels.runtime.operation import Operation

FUSED_ROWS = 64
"""Largest M for which the matrix is not decoded first."""


def _ternary_matmul_torch(x: Tensor, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, dtype or x.dtype))
    return (x @ decode_digits(packed, x.dtype).T).to(dtype or x.dtype)


def _ternary_matmul_grad_x_torch(grad_y: Tensor, packed: Packed) -> Tensor:
    return grad_y @ decode_digits(packed, grad_y.dtype)


@triton.jit
def _ternary_matmul_kernel(
    x_ptr, packed_ptr, exponent_ptr, fraction_ptr, y_ptr,
    M, N, K, row_bytes,
    stride_xm, stride_xk, stride_pn, stride_pb,
    stride_en, stride_eg, stride_fn, stride_fg, stride_ym, stride_yn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask_m, mask_n = offs_m < M, offs_n < N

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, row_bytes, 32):
        offs_b = start + tl.arange(0, 32)
        byte = tl.load(  # [32, BLOCK_N] uint8
            packed_ptr + offs_n * stride_pn + offs_b[:, None] * stride_pb,
            mask=mask_n & (offs_b < row_bytes)[:, None], other=0,
        )  # fmt: skip
        for digit in tl.static_range(5):
            k = plane_offsets(offs_b, K, digit)
            x = tl.load(  # [BLOCK_M, 32], 0 in the padding, so its weights do not matter
                x_ptr + offs_m * stride_xm + k[None, :] * stride_xk,
                mask=mask_m & (k < K)[None, :], other=0.0,
            )  # fmt: skip
            scale = load_scale(
                exponent_ptr, fraction_ptr, offs_n, k[:, None] // GROUP,
                mask_n & (k < K)[:, None], stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
            )  # fmt: skip
            weight = (digit_of(byte, digit).to(tl.float32) * scale).to(x.dtype)  # [32, BLOCK_N]
            acc = tl.dot(x, weight, acc, input_precision="ieee")

    y_ptrs = y_ptr + offs_m * stride_ym + offs_n * stride_yn
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m & mask_n)


def _ternary_matmul_triton(x: Tensor, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    dtype, (rows, in_features) = dtype or x.dtype, x.shape
    if fits_few_rows(x, packed):
        return few_rows(x, packed, dtype)
    if rows > FUSED_ROWS or packed.remainder is not None:
        x = x.to(torch.promote_types(x.dtype, dtype))
        return (x @ decode_weight_triton(packed, x.dtype).T).to(dtype)
    out_features, num_bytes = packed.trits.shape
    y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    _ternary_matmul_kernel[(triton.cdiv(rows, 16), triton.cdiv(out_features, 32))](
        x, *packed.pointers, y, rows, out_features, in_features, num_bytes,
        *x.stride(), *packed.strides, *y.stride(),
        **packed.constants, BLOCK_M=16, BLOCK_N=32,
        # float32 products are unrolled: with fewer warps, registers spill
        num_warps=8 if x.dtype == torch.float32 else 4,
    )  # fmt: skip
    return y


def _ternary_matmul_grad_x_triton(grad_y: Tensor, packed: Packed) -> Tensor:
    return grad_y @ decode_weight_triton(packed, grad_y.dtype)


ternary_matmul = Operation(
    "ternary_matmul", _ternary_matmul_triton, _ternary_matmul_torch,
    {"x": Array("M, K"), "packed": Matrix(), "dtype": Number()},
)  # fmt: skip
"""Multiply activations by a packed matrix.

y[m, n] = sum over k of x[m, k] * w[n, k], accumulated in float32

Args:
    x: (M, K) bfloat16 or float32, any strides.
    packed: w, N rows by K weights.
    dtype: of the result, bfloat16 or float32; by default that of `x`.

Returns:
    (M, N) in `dtype`.
"""
ternary_matmul_grad_x = Operation(
    "ternary_matmul_grad_x", _ternary_matmul_grad_x_triton, _ternary_matmul_grad_x_torch,
    {"grad_y": Array("M, N"), "packed": Matrix()},
)  # fmt: skip
"""Compute the gradient of x of `ternary_matmul`.

grad_x[m, k] = sum over n of grad_y[m, n] * w[n, k], accumulated in float32

Args:
    grad_y: (M, N) bfloat16 or float32, any strides.
    packed: w, N rows by K weights.

Returns:
    (M, K) in the dtype of `grad_y`.
"""

"""Products of NVFP4 matrices from their codes and scales, on tensor cores that support them.

    x ~ g * s * q,   y = g_a g_b * sum over k of (s_a q_a) (s_b q_b)

with g, s, q and codes as in `round_nvfp4`. From compute capability 10 on, the hardware multiplies
codes. On older GPUs the kernel decodes them first, because not every version of Triton does that.
Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
"""

import torch
from torch import Tensor

from arbcli.families.nvfp4.kernels.round_nvfp4 import (
    BLOCK,
    encode_nvfp4,
    number_of_code,
    number_of_scale,
    nvfp4_numbers,
    round_nvfp4,
)
from arbcli.kernels.codec.decode_weight import decode_weight, decode_weight_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, UINT8, Array, Number
from arbcli.kernels.runtime.backend import capability, uses_triton
from arbcli.kernels.runtime.operation import Operation

FIRST_CAPABILITY = (10, 0)
"""First compute capability with NVFP4 products in hardware."""

_BLOCK = tl.constexpr(BLOCK)


def _scaled_nvfp4_matmul_torch(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    rows, columns = (nvfp4_numbers(*part, torch.float32) for part in ((a, a_scales), (b, b_scales)))
    return (rows @ columns.T * scale).to(dtype)


@triton.jit
def _decoded(codes, bits, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Decode codes and scales to float32, [BLOCK_M, BLOCK_K]."""
    codes = codes.to(tl.int32)
    numbers = tl.join(number_of_code(codes & 15), number_of_code(codes >> 4))
    numbers = tl.reshape(numbers, [BLOCK_M, BLOCK_K // _BLOCK, _BLOCK])
    return tl.reshape(numbers * number_of_scale(bits, False)[:, :, None], [BLOCK_M, BLOCK_K])


@triton.jit
def _scaled_nvfp4_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, scale_ptr, y_ptr,
    M, N, K, B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k, offs_b = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // _BLOCK)
    m_mask, n_mask = (m < M)[:, None], (n < N)[:, None]
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K // 2):  # K counts bytes, of two codes each
        k = start + offs_k
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=m_mask & (k < K)[None, :], other=0)
        b = tl.load(b_ptr + n[:, None] * K + k[None, :], mask=n_mask & (k < K)[None, :], other=0)
        at = start // (_BLOCK // 2) + offs_b
        there = (at < B)[None, :]
        s = tl.load(a_scales_ptr + m[:, None] * B + at[None, :], mask=m_mask & there, other=0)
        t = tl.load(b_scales_ptr + n[:, None] * B + at[None, :], mask=n_mask & there, other=0)
        if SCALED:
            s, t = s.to(tl.float8e4nv, bitcast=True), t.to(tl.float8e4nv, bitcast=True)
            y = tl.dot_scaled(a, s, "e2m1", tl.trans(b), t, "e2m1", y)
        else:
            rows = _decoded(a, s, BLOCK_M, BLOCK_K)
            columns = _decoded(b, t, BLOCK_N, BLOCK_K)
            y = tl.dot(rows, tl.trans(columns), y, input_precision=PRECISION)
    y = y * tl.load(scale_ptr)
    out = y_ptr + m[:, None] * N + n[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=m_mask & (n < N)[None, :])


def _scaled_nvfp4_matmul_triton(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    (rows, half), outputs = a.shape, len(b)
    y = torch.empty(rows, outputs, dtype=dtype, device=a.device)
    if y.numel():
        scaled = capability(a) >= FIRST_CAPABILITY
        tile = (128, 64, 64) if scaled else (16, 16, 128)  # larger tiles spill registers
        grid = triton.cdiv(rows, tile[0]), triton.cdiv(outputs, tile[1])
        _scaled_nvfp4_kernel[grid](
            a, a_scales, b, b_scales, scale, y, rows, outputs, half, a_scales.shape[1],
            BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=tile[2], SCALED=scaled,
            PRECISION="ieee" if INTERPRETED else "tf32",  # six bits, exact in both dtypes
            num_warps=8 if scaled else 4,
        )  # fmt: skip
    return y


def nvfp4_matmul(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """Multiply NVFP4 activations by a packed matrix in bfloat16, accumulated in float32.

    Args:
        q: (M, K) float32 or bfloat16; (M, N) if `transposed`.
        scale: (1,) float32, g; `q` and `scale` are results of `round_nvfp4`.
        packed: w, N rows by K weights, quantised along the summed dimension. Trits are exact,
            except for the fractions of their scales; groups of T16 are the blocks of NVFP4.
        transposed: whether to compute q @ w, for a gradient.
        dtype: dtype of the result.

    Returns:
        (M, N); (M, K) if `transposed`. NaN if `scale` is NaN.
    """
    weight = decode_weight(packed, q.dtype)
    weight, weight_scale = round_nvfp4(weight.T if transposed else weight)
    return ((q @ weight.T).float() * (scale * weight_scale)).to(dtype)


def nvfp4_product(x: Tensor, packed: Packed, *, transposed: bool = False) -> Tensor:
    """Multiply activations by a packed matrix, or a gradient by its transpose, in NVFP4.

    Uses hardware that supports NVFP4; otherwise the same numbers are multiplied in bfloat16:
        see `nvfp4_matmul`.

    Args:
        x: (M, K) float32 or bfloat16; (M, N) if `transposed`.
        packed: N rows by K weights, both multiples of `MULTIPLE`.
        transposed: whether to compute x @ w, for a gradient.

    Returns:
        (M, N) in the dtype of x; (M, K) if `transposed`.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    if not (uses_triton(x) and capability(x) >= FIRST_CAPABILITY):
        return nvfp4_matmul(*round_nvfp4(x), packed, transposed, x.dtype)
    weight = decode_weight_triton(packed, x.dtype)
    a, a_scales, first = encode_nvfp4(x)
    b, b_scales, second = encode_nvfp4(weight.T if transposed else weight)
    return scaled_nvfp4_matmul(a, a_scales, b, b_scales, first * second, x.dtype)


scaled_nvfp4_matmul = Operation(
    "scaled_nvfp4_matmul", _scaled_nvfp4_matmul_triton, _scaled_nvfp4_matmul_torch,
    {
        "a": Array("M, 8 * B", UINT8, dense=True), "a_scales": Array("M, B", UINT8, dense=True),
        "b": Array("N, 8 * B", UINT8, dense=True), "b_scales": Array("N, B", UINT8, dense=True),
        "scale": Array("1", FLOAT, dense=True), "dtype": Number(),
    },
)  # fmt: skip
"""Compute a @ b.T for two matrices of NVFP4 codes, accumulated in float32.

Args:
    a: (M, 8 B) uint8 codes, contiguous, from `encode_nvfp4`.
    a_scales: (M, B) uint8: scales of a.
    b: (N, 8 B) like a.
    b_scales: (N, B) like `a_scales`: scales of b.
    scale: (1,) float32: g_a g_b.
    dtype: dtype of the result, bfloat16 or float32.

Returns:
    (M, N) in `dtype`.
"""

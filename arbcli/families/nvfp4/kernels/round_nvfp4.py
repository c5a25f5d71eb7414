"""Quantise a matrix to NVFP4: four-bit numbers, a scale per 16 columns, and one global scale.

x ~ g * s * q, with q in e2m1 (0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign), s in e4m3 for 16 columns,
and g for the matrix:

    g = 2**(octave(max |x|) - 10)
    s = e4m3(min(max of 16 |x| / g / 6, 448)),   q = e2m1(x / g / s)

g is a power of two, so that dividing by it is exact, and brings the largest s between 170 and 342:
no s is beyond 448, the largest of e4m3. Ties of q go to the even place among its numbers. s * q has
six bits at most, which bfloat16 holds: so what hardware of such numbers would multiply, it can
multiply here.
Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import from_e4m3
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3, to_e4m3
from arbcli.kernels.runtime.operation import Operation, tl, triton

BLOCK = 16
"""Columns per scale."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 numbers, indexed by code."""
OCTAVE = 10
"""Octave of the largest magnitude divided by g."""
SIXTH = 1 / 6
MAX_SCALE = 448.0

_BLOCK, _SIXTH, _LARGEST = map(tl.constexpr, (BLOCK, SIXTH, MAX_SCALE))


def global_scale(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the largest magnitude, g and 1 / g: (1,) float32; g is NaN if it is not finite."""
    largest = x.abs().amax().float()[None] if x.numel() else x.new_zeros(1, dtype=torch.float32)
    field = (largest.view(torch.int32) >> 23).clamp(min=OCTAVE + 1)
    scale = ((field - OCTAVE) << 23).view(torch.float32)
    inverse = ((254 + OCTAVE - field) << 23).view(torch.float32)
    return largest, torch.where(largest < torch.inf, scale, torch.nan), inverse


def _round_nvfp4_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    _, scale, inverse = global_scale(x)
    padding = (0, -x.shape[1] % BLOCK)
    t = torch.nn.functional.pad(x.float() * inverse, padding).unflatten(1, (-1, BLOCK))
    size = t.abs()
    s = (size.amax(dim=2, keepdim=True) * SIXTH).clamp(max=MAX_SCALE).to(E4M3).float()
    code = torch.zeros_like(size, dtype=torch.int64)
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)):
        edge = middle * s
        code += (size >= edge) if index % 2 else (size > edge)
    q = torch.tensor(NUMBERS, device=x.device)[code]
    return (t.sign() * q * s).flatten(1)[:, : x.shape[1]].to(x.dtype).contiguous(), scale


@triton.jit
def _nvfp4_kernel(
    x_ptr, largest_ptr, y_ptr,
    M, K, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    k = b[None, :, None] * _BLOCK + tl.arange(0, _BLOCK)[None, None, :]
    mask = (m < M)[:, None, None] & (k < K)
    x_ptrs = x_ptr + m[:, None, None] * stride_xm + k * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
    field = tl.maximum(tl.load(largest_ptr).to(tl.int32, bitcast=True) >> 23, 11)
    t = x * ((264 - field) << 23).to(tl.float32, bitcast=True)
    size = tl.abs(t)
    bits = to_e4m3(tl.minimum(tl.max(size, axis=2) * _SIXTH, _LARGEST), NATIVE)
    s = from_e4m3(bits, NATIVE)[:, :, None]
    # comparisons instead of a quotient give the same bits on every backend
    code = (size > 0.25 * s).to(tl.int32) + (size >= 0.75 * s).to(tl.int32)
    code += (size > 1.25 * s).to(tl.int32) + (size >= 1.75 * s).to(tl.int32)
    code += (size > 2.5 * s).to(tl.int32) + (size >= 3.5 * s).to(tl.int32)
    code += (size > 5.0 * s).to(tl.int32)
    large = ((1 << (code >> 1)) * (2 + (code & 1))).to(tl.float32) * 0.25
    y = tl.where(code < 2, code.to(tl.float32) * 0.5, large) * s
    y = tl.where(t < 0, -y, y).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None, None] * K + k, y, mask=mask)


def _round_nvfp4_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    largest, scale, _ = global_scale(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, number = len(x), triton.cdiv(x.shape[1], BLOCK)
        blocks = min(16, triton.next_power_of_2(number))
        block_m = min(128 // blocks, triton.next_power_of_2(rows))
        _nvfp4_kernel[(triton.cdiv(rows, block_m), triton.cdiv(number, blocks))](
            x, largest, y, *x.shape, *x.stride(),
            BLOCK_M=block_m, BLOCKS=blocks, NATIVE=has_e4m3(x),
        )  # fmt: skip
    return y, scale


def round_stack_nvfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round each matrix of a stack with its own g, in one launch.

    Each matrix is first scaled to the same octave by a power of two, which is exact.

    Args:
        w: (E, M, K) float32 or bfloat16, any strides.

    Returns:
        s * q, (E, M, K) in the dtype of w, contiguous; and g of each, (E,) float32.
    """
    field = (w.abs().amax(dim=(1, 2)).float().view(torch.int32) >> 23).clamp(OCTAVE + 1, 253)
    inverse = ((254 - field) << 23).view(torch.float32).to(w.dtype)
    y, scale = round_nvfp4((w * inverse[:, None, None]).flatten(0, 1))
    return y.view(w.shape), scale * (field << 23).view(torch.float32)


round_nvfp4 = Operation(
    "round_nvfp4", _round_nvfp4_triton, _round_nvfp4_torch,
    "x: real[M, D]",
)  # fmt: skip
"""Round a matrix to NVFP4, with the block scales multiplied in.

Args:
    x: (M, K) float32 or bfloat16, any strides.

Returns:
    s * q, (M, K) in the dtype of x, contiguous; and g, (1,) float32, which is NaN if an element
    is not finite.
"""

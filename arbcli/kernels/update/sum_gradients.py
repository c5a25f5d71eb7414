"""Sum the quantised gradients of several processes, and invert the Hadamard mixing of columns.

    g[n, k] = 2**e[n] * s[k] / B * (sum over p of q[p] times H)[n, k]

with blocks, s and H as in `hadamard`. The sum is exact in int32, and is rounded once, to the dtype
of the gradient.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL
from arbcli.kernels.runtime.backend import count_tiles, row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.hadamard import BLOCK_FITS, column_signs, mix_blocks, mixed_back
from arbcli.kernels.update.quantise_gradient import NONE, NOT_FINITE, together


def _sum_gradients_torch(
    parts: Tensor, low: Tensor | None, exponent: Tensor, fitting: Tensor, block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    grad = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    scale = ((127 + exponent.int()) << 23).view(torch.float32)
    scale = torch.where(exponent == NONE, 0.0, scale / block)
    wrong = (fitting == NOT_FINITE).any(dim=0)[:, None]
    for rows in row_chunks(grad):
        pairs = None if low is None else low[:, rows.start // 2 : (rows.stop + 1) // 2]
        total = together(parts[:, rows], pairs).sum(dim=0, dtype=torch.int32)
        total = mixed_back(total, block).float() * scale[rows, None]
        grad[rows] = total.masked_fill_(wrong[rows], torch.inf)
    return grad


@triton.jit
def _sum_gradients_kernel(
    parts_ptr, low_ptr, exponent_ptr, fitting_ptr, grad_ptr,
    N, K, stride_pp, stride_lp, stride_fp,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (n < N)[:, None] & (k < K)
    # power of two of each row, over the size of a Hadamard block
    e = tl.load(exponent_ptr + n, mask=n < N, other=-128).to(tl.int32)
    scale = ((127 + e) << 23).to(tl.float32, bitcast=True) * (1.0 / BLOCK)
    scale = tl.where(e == -128, 0.0, scale)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.int32)
    worst = tl.full((BLOCK_N,), -128, dtype=tl.int32)
    # exact int32 sum over processes, and the largest of their fitting exponents
    for _ in range(PARTS):
        part = tl.load(parts_ptr + n[:, None] * K + k, mask=mask, other=0).to(tl.int32)
        if low_ptr is not None:
            bits = tl.load(low_ptr + n[:, None] // 2 * K + k, mask=mask, other=0).to(tl.int32)
            part = part * 16 + ((bits >> (4 * (n[:, None] % 2)).to(tl.int32)) & 15)
            low_ptr += stride_lp
        total += part
        fits = tl.load(fitting_ptr + n, mask=n < N, other=0)
        parts_ptr += stride_pp
        fitting_ptr += stride_fp
        worst = tl.maximum(worst, fits.to(tl.int32))
    # invert the mixing, scale, and make rows infinite that were so in any process
    if STAGES > 0:
        total = mix_blocks(total, BLOCK, STAGES) * column_signs(k)
    grad = total.to(tl.float32) * scale[:, None]
    grad = tl.where((worst == 127)[:, None], float("inf"), grad)
    tl.store(grad_ptr + n[:, None] * K + k, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def _sum_gradients_triton(
    parts: Tensor, low: Tensor | None, exponent: Tensor, fitting: Tensor, block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    number, rows, columns = parts.shape
    grad = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if grad.numel():
        block_k = min(512, triton.next_power_of_2(columns))
        block_n = max(1, 1024 // block_k)
        _sum_gradients_kernel[(count_tiles(rows, columns, block_n, block_k),)](
            parts, low, exponent, fitting, grad, rows, columns,
            parts.stride(0), 0 if low is None else low.stride(0), fitting.stride(0),
            PARTS=number, BLOCK=block, STAGES=block.bit_length() - 1,
            BLOCK_N=block_n, BLOCK_K=block_k,
        )  # fmt: skip
    return grad


sum_gradients = Operation(
    "sum_gradients", _sum_gradients_triton, _sum_gradients_torch,
    "parts: int8|int16|int32[P, N, K] parts; low: uint8[P, (N + 1) // 2, K]? parts; "
    "exponent: int8[N] dense; fitting: int8[P, N] parts; block; dtype",
    where=("P > 0", "low is None or parts.dtype == torch.int8", BLOCK_FITS, DTYPE_IS_REAL),
)  # fmt: skip
"""Sum the parts of a quantised gradient.

Args:
    parts: (P, N, K) int8, int16 or int32, each part contiguous. B times the largest sum is
        below 2**31.
    low: (P, (N + 1) // 2, K) uint8, each part contiguous, or None: as of `quantise_gradient`.
    exponent: (N,) int8, contiguous: the `exponent` argument of `quantise_gradient`.
    fitting: (P, N) int8, each part contiguous: the `fitting` result of each part.
    block: B, as in `quantise_gradient`.
    dtype: float32 or bfloat16.

Returns:
    (N, K) of `dtype`. A row without an exponent is 0, one that was not finite is infinite.
"""

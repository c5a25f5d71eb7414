"""Add up the integers that processes made of a gradient: g = 2**e[n] * sum over p of q[p, n, k].

The sum is exact in int32, and is rounded once, to the dtype of the gradient: bfloat16 holds sums of
magnitude up to 256, float32 up to 2**24.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import row_chunks, uses_triton
from arbcli.kernels.runtime.spec import MATRIX, Case, KernelSpec, Timing
from arbcli.kernels.update.quantise_gradient import NONE, NOT_FINITE


def sum_gradients_reference(
    parts: Tensor, exponent: Tensor, fitting: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute what `sum_gradients` must return, in int64 and float64."""
    total = parts.long().sum(0).double() * torch.exp2(exponent.double())[:, None]
    total = torch.where((exponent == -128)[:, None], 0, total)
    wrong = (fitting == 127).any(dim=0)[:, None]
    return torch.where(wrong, torch.inf, total).to(dtype)


def _sum_gradients_torch(parts, exponent, fitting, dtype=torch.float32):
    grad = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    scale = ((127 + exponent.int()) << 23).view(torch.float32)
    scale = torch.where(exponent == NONE, 0.0, scale)
    wrong = (fitting == NOT_FINITE).any(dim=0)[:, None]
    for rows in row_chunks(grad):
        total = parts[:, rows].sum(dim=0, dtype=torch.int32).float() * scale[rows, None]
        grad[rows] = total.masked_fill_(wrong[rows], torch.inf)
    return grad


@triton.jit
def _sum_gradients_kernel(
    parts_ptr, exponent_ptr, fitting_ptr, grad_ptr,
    N, K, stride_pp, stride_fp,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (n < N)[:, None] & (k < K)
    e = tl.load(exponent_ptr + n, mask=n < N, other=-128).to(tl.int32)
    scale = ((127 + e) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(e == -128, 0.0, scale)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.int32)
    worst = tl.full((BLOCK_N,), -128, dtype=tl.int32)
    for _ in range(PARTS):
        total += tl.load(parts_ptr + n[:, None] * K + k, mask=mask, other=0).to(tl.int32)
        fits = tl.load(fitting_ptr + n, mask=n < N, other=0)
        parts_ptr += stride_pp
        fitting_ptr += stride_fp
        worst = tl.maximum(worst, fits.to(tl.int32))
    grad = total.to(tl.float32) * scale[:, None]
    grad = tl.where((worst == 127)[:, None], float("inf"), grad)
    tl.store(grad_ptr + n[:, None] * K + k, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def _sum_gradients_triton(parts, exponent, fitting, dtype=torch.float32):
    number, rows, columns = parts.shape
    grad = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if grad.numel():
        block_k = min(512, triton.next_power_of_2(columns))
        block_n = max(1, 1024 // block_k)
        _sum_gradients_kernel[(triton.cdiv(rows, block_n) * triton.cdiv(columns, block_k),)](
            parts, exponent, fitting, grad, rows, columns, parts.stride(0), fitting.stride(0),
            PARTS=number, BLOCK_N=block_n, BLOCK_K=block_k,
        )  # fmt: skip
    return grad


def sum_gradients(
    parts: Tensor, exponent: Tensor, fitting: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Add up the parts of a gradient.

    Args:
        parts: (P, N, K) int8, int16 or int32, each part contiguous.
        exponent: (N,) int8, contiguous; what `quantise_gradient` divided by.
        fitting: (P, N) int8, each part contiguous; what it found.
        dtype: float32 or bfloat16.

    Returns:
        (N, K) of `dtype`. A row without an exponent is 0, one that was not finite is infinite.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    number, rows, _columns = parts.shape
    if parts.dtype not in (torch.int8, torch.int16, torch.int32) or not parts[0].is_contiguous():
        raise ValueError(f"need contiguous parts of integers, got {parts.dtype} {parts.stride()}")
    if tuple(exponent.shape) != (rows,) or tuple(fitting.shape) != (number, rows):
        got = f"{tuple(exponent.shape)} and {tuple(fitting.shape)}"
        raise ValueError(f"need {rows} exponents of each of {number} parts, got {got}")
    run = _sum_gradients_triton if uses_triton(parts) else _sum_gradients_torch
    return run(parts, exponent, fitting, dtype)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device, dtype)

    for number, rows, columns, limit, dtype in (
        (1, 1, 1, 127, torch.int8), (2, 3, 33, 63, torch.int8), (4, 17, 523, 31, torch.int8),
        (3, 33, 1, 127, torch.int8), (2, 9, 40, 3000, torch.int16), (2, 5, 7, 2**20, torch.int32),
    ):  # fmt: skip
        parts = integers(-limit, limit + 1, number, rows, columns, dtype=dtype)
        exponent, fitting = integers(-100, 100, rows), integers(-9, 0, number, rows)
        inputs = parts, exponent, fitting
        yield Case(f"{number}x{rows}x{columns} {dtype}", (*inputs, torch.float32))
        if limit * number <= 256:  # which bfloat16 has exactly
            yield Case(f"{number}x{rows}x{columns} {dtype} bf16", (*inputs, torch.bfloat16))
    exponent, fitting = exponent.clone(), fitting.clone()
    exponent[1], fitting[1, 2], fitting[0, 3] = NONE, NOT_FINITE, NOT_FINITE
    yield Case("2x5x7 none and not finite", (parts, exponent, fitting, torch.float32))
    wide = integers(-31, 32, 4, 8 * 40 + 16)
    apart = wide[:, :320].unflatten(1, (8, 40)), integers(-9, 9, 8), integers(-9, 0, 4, 24)[:, :8]
    yield Case("4x8x40 with gaps", (*apart, torch.float32))


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    exponent = torch.full(MATRIX[:1], -4, dtype=torch.int8, device=device)
    for number in (1, 4):
        parts = torch.ones(number, *MATRIX, dtype=torch.int8, device=device)
        fitting = exponent.expand(number, -1).contiguous()
        inputs = (parts, exponent, fitting, torch.bfloat16)
        yield Timing(f"{number} parts of 11264x2048", inputs)


SUM_GRADIENTS = KernelSpec(
    "sum_gradients",
    _sum_gradients_triton,
    _sum_gradients_torch,
    sum_gradients_reference,
    _cases,
    timings=_timings,
    bfloat16=(),
)

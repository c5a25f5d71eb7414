"""RMS norm of rows with gains: y = x * rsqrt(mean(x**2) + eps) * w.

w is a row of gains; the default is ones.
Backward, with r = rsqrt(mean(x**2) + eps) and xhat = x * r:
grad_x = r * (gy * w - xhat * mean(xhat * gy * w)).

The backward also returns y, so that only x has to be saved, not the input of the next layer. It can
add another gradient of x, such as that of a residual stream, to grad_x before rounding.
Rows are kept in registers; wider rows are read twice, in blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton

FEW_ROWS = 8
"""Number of rows, as in generation, up to which more threads share a row."""
WHOLE_ROW = 8192
"""Largest row that a program keeps in registers, in columns."""


def normalise_sum(norm: Callable) -> Callable[..., Any]:
    """Add to the first input of a norm, rounded as in torch; return the sum and its norm."""

    def run(x: Tensor, added: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        total = (x + added).contiguous()
        return total, norm(total, weight, eps)

    return run


def _rms_norm_torch(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, out = x.reshape(-1, width), y.view(-1, width)
    for rows in row_chunks(x):
        out[rows] = torch_rms_norm(x[rows].to(torch.float32), (width,), weight, eps)
    return y


def _rms_norm_backward_torch(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    grad_x, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    results = grad_x.view(-1, width), y.view(-1, width)
    grad_y, x = grad_y.reshape(-1, width), x.reshape(-1, width)
    for rows in row_chunks(x):
        parts = norm_gradient(grad_y[rows], x[rows].to(torch.float32), weight, eps)
        for result, part in zip(results, parts, strict=True):
            result[rows] = part
    return grad_x if other_grad is None else grad_x.add_(other_grad), y


def rms_norm_native(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute `rms_norm` with the native loop."""
    return norm_native(x, weight, eps, gated=False)


def rms_norm_backward_native(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_backward` with the native loop."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _, y = norm_backward_native(grad_y, x, weight, eps, gated=False, grad_x=grad_x)
    return grad_x if other_grad is None else grad_x.add_(other_grad), y


def norm_native(x: Tensor, weight: Tensor | None, eps: float | None, *, gated: bool) -> Tensor:
    """Normalise rows, or if `gated` silu(first half) * second half, with the native loop.

    Without an eps there is no norm.
    """
    width = x.shape[-1] // (1 + gated)
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y.numel():
        rows, threads = native.dense_rows(x), native.threads_for(x.numel())
        native.call(
            "norm", rows, rows.stride(0), x.dtype == torch.bfloat16, weight,
            -1.0 if eps is None else eps, gated, y, len(rows), width, threads,
        )  # fmt: skip
    return y


def norm_backward_native(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, eps: float | None, *, gated: bool,
    grad_x: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradient of x in `norm_native`, and recompute its result.

    The gradient is written to `grad_x`, like x and contiguous. It may be x itself, as each row is
    read before it is written.
    """
    y = torch.empty(grad_y.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        rows, grads = native.dense_rows(x), native.dense_rows(grad_y)
        native.call(
            "norm_backward", grads, grads.stride(0), rows, rows.stride(0),
            x.dtype == torch.bfloat16, weight, -1.0 if eps is None else eps,
            gated, grad_x, y, len(rows), y.shape[-1], native.threads_for(x.numel()),
        )  # fmt: skip
    return grad_x, y


def norm_gradient(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute grad_x and y with torch, from (M, D) float32 x and (D,) float32 weights."""
    width = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    r = norm.square_().div_(width).add_(eps).rsqrt_()
    xhat = x * r
    grad_x = grad_y.to(torch.float32, copy=True) if weight is None else grad_y * weight
    mean = torch.linalg.vecdot(xhat, grad_x)[:, None] / width
    grad_x.addcmul_(xhat, mean, value=-1).mul_(r)
    return grad_x, xhat if weight is None else xhat.mul_(weight)


@triton.jit
def load_rows(ptr, offs_m, offs_d, mask, stride_m):
    """Load a [BLOCK_M, BLOCK_D] tile as float32, 0 where masked."""
    return tl.load(ptr + offs_m * stride_m + offs_d[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def tile_at(start, offs_m, M, D, BLOCK_D: tl.constexpr):
    """Compute the columns, [BLOCK_D], and the mask of the tile from column `start` on."""
    offs_d = start + tl.arange(0, BLOCK_D)
    return offs_d, (offs_m < M) & (offs_d < D)[None, :]


@triton.jit
def load_tile(ptr, start, offs_m, M, D, stride_m, BLOCK_D: tl.constexpr):
    """Load the tile of `tile_at` as float32; return its columns and mask, too."""
    offs_d, mask = tile_at(start, offs_m, M, D, BLOCK_D)
    return load_rows(ptr, offs_m, offs_d, mask, stride_m), offs_d, mask


@triton.jit
def load_weight(ptr, offs_d, D, one, HAS_WEIGHT: tl.constexpr):
    """Load float32 weights of columns, [1, BLOCK_D]; without weights return `one`, which is 1.

    `one` is a kernel argument, not a constant, so the compiler emits the same fused instructions
        as for weights, and the results have the same bits.
    """
    weight = one
    if HAS_WEIGHT:
        weight = tl.load(ptr + offs_d, mask=offs_d < D, other=0)[None, :]
    return weight


@triton.jit
def store_rows(ptr, values, offs_m, offs_d, mask, stride_m):
    """Store a float32 tile to rows `stride_m` apart, rounded once."""
    ptrs = ptr + offs_m * stride_m + offs_d[None, :]
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, total_ptr, y_ptr,
    M, D, eps, one,
    stride_xm, stride_am,
    HAS_WEIGHT: tl.constexpr, ADD: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    if WHOLE:  # rows stay in registers
        x, offs_d, mask = load_tile(x_ptr, 0, offs_m, M, D, stride_xm, BLOCK_D)
        weight = load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
        if ADD:  # what is normalised is the sum as it is stored
            x += load_rows(added_ptr, offs_m, offs_d, mask, stride_am)
            x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
            store_rows(total_ptr, x, offs_m, offs_d, mask, D)
        r = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        store_rows(y_ptr, x * r * weight, offs_m, offs_d, mask, D)
    else:
        # rows too long for registers are read twice: for the mean square, then for the result
        squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            x, offs_d, mask = load_tile(x_ptr, start, offs_m, M, D, stride_xm, BLOCK_D)
            squares += tl.sum(x * x, axis=1)
        r = tl.rsqrt(squares / D + eps)[:, None]
        for start in range(0, D, BLOCK_D):
            x, offs_d, mask = load_tile(x_ptr, start, offs_m, M, D, stride_xm, BLOCK_D)
            y = x * r * load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
            store_rows(y_ptr, y, offs_m, offs_d, mask, D)


@triton.jit
def store_gradient(
    grad_x_ptr, values, offs_m, offs_d, mask, D, other_grad_ptr, stride_bm, OTHER_GRAD: tl.constexpr
):
    """Store a gradient, after adding another one and before rounding."""
    if OTHER_GRAD:
        values = values.to(grad_x_ptr.dtype.element_ty).to(tl.float32)
        values += load_rows(other_grad_ptr, offs_m, offs_d, mask, stride_bm)
    store_rows(grad_x_ptr, values, offs_m, offs_d, mask, D)


@triton.jit
def _rms_norm_backward_kernel(
    grad_y_ptr, x_ptr, weight_ptr, other_grad_ptr, grad_x_ptr, y_ptr,
    M, D, eps, one,
    stride_ym, stride_xm, stride_bm,
    HAS_WEIGHT: tl.constexpr, OTHER_GRAD: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    other = (other_grad_ptr, stride_bm)
    if WHOLE:
        x, offs_d, mask = load_tile(x_ptr, 0, offs_m, M, D, stride_xm, BLOCK_D)
        weight = load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
        # gradient of the normalised row, which is projected off that row
        grad_xhat = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym) * weight
        r = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        xhat = x * r
        mean = (tl.sum(xhat * grad_xhat, axis=1) / D)[:, None]
        grad_x = r * (grad_xhat - xhat * mean)
        store_gradient(grad_x_ptr, grad_x, offs_m, offs_d, mask, D, *other, OTHER_GRAD)
        store_rows(y_ptr, xhat * weight, offs_m, offs_d, mask, D)
    else:
        # first pass: mean square, and mean product of the row and its gradient
        squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        products = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            x, offs_d, mask = load_tile(x_ptr, start, offs_m, M, D, stride_xm, BLOCK_D)
            grad_y = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym)
            squares += tl.sum(x * x, axis=1)
            weight = load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
            products += tl.sum(x * grad_y * weight, axis=1)
        r = tl.rsqrt(squares / D + eps)
        mean = (products * r / D)[:, None]  # of xhat * gy * w
        r = r[:, None]
        # second pass: the gradient, and y again
        for start in range(0, D, BLOCK_D):
            offs_d, mask = tile_at(start, offs_m, M, D, BLOCK_D)
            weight = load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
            xhat = load_rows(x_ptr, offs_m, offs_d, mask, stride_xm) * r
            grad_xhat = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym) * weight
            grad_x = r * (grad_xhat - xhat * mean)
            store_gradient(grad_x_ptr, grad_x, offs_m, offs_d, mask, D, *other, OTHER_GRAD)
            store_rows(y_ptr, xhat * weight, offs_m, offs_d, mask, D)


def tiling(
    rows: int, width: int, elements: int = 16, whole: int = WHOLE_ROW
) -> tuple[tuple[int], dict[str, int]]:
    """Choose the number of programs and their tiles.

    With few rows the GPU is not full, and the latency of one program matters.

    Args:
        rows: M.
        width: D.
        elements: elements per thread, with many rows.
        whole: largest width of rows that are kept in registers.
    """
    if width > whole:
        return (rows,), {"WHOLE": False, "BLOCK_M": 1, "BLOCK_D": 1024, "num_warps": 4}
    block_d = triton.next_power_of_2(width)
    block_m, elements = (1, 8) if rows <= FEW_ROWS else (max(1024 // block_d, 1), elements)
    warps = min(max(block_m * block_d // (32 * elements), 1), 16)
    tile = {"WHOLE": True, "BLOCK_M": block_m, "BLOCK_D": block_d, "num_warps": warps}
    return (triton.cdiv(rows, block_m),), tile


def dense_rows(x: Tensor) -> Tensor:
    """View, or copy, (..., D) as rows with contiguous elements."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        x, width = dense_rows(x), x.shape[-1]
        grid, tile = tiling(len(x), width)
        _rms_norm_kernel[grid](
            x, x, y if weight is None else weight, y, y, len(x), width, eps, 1.0, x.stride(0), 0,
            HAS_WEIGHT=weight is not None, ADD=False, **tile,
        )  # fmt: skip
    return y


def _add_rms_norm_triton(
    x: Tensor, added: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    grid, tile = tiling(x.numel() // max(width, 1), width)
    if not (x.numel() and tile["WHOLE"]):
        return normalise_sum(_rms_norm_triton)(x, added, weight, eps)
    total, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    x, added = dense_rows(x), dense_rows(added)
    _rms_norm_kernel[grid](
        x, added, y if weight is None else weight, total, y, len(x), width, eps, 1.0,
        x.stride(0), added.stride(0), HAS_WEIGHT=weight is not None, ADD=True, **tile,
    )  # fmt: skip
    return total, y


def _rms_norm_backward_triton(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty_like(grad_x)
    if y.numel():
        x, grad_y, width = dense_rows(x), dense_rows(grad_y), x.shape[-1]
        grid, tile = tiling(len(x), width)
        others = x if other_grad is None else dense_rows(other_grad)
        _rms_norm_backward_kernel[grid](
            grad_y, x, y if weight is None else weight, others, grad_x, y, len(x), width, eps,
            1.0, grad_y.stride(0), x.stride(0), others.stride(0),
            HAS_WEIGHT=weight is not None, OTHER_GRAD=other_grad is not None, **tile,
        )  # fmt: skip
    return grad_x, y


rms_norm = Operation(
    "rms_norm", _rms_norm_triton, _rms_norm_torch,
    "x: real[*B, D]; weight: float32[D]? dense; eps",
    native=rms_norm_native,
)  # fmt: skip
"""Normalise the rows of `x` by their root mean square and multiply them by gains.

Args:
    x: (..., D) float32 or bfloat16, any strides.
    weight: gains, (D,) float32, contiguous; None is ones, with the same bits.
    eps: added to the mean square.

Returns:
    (..., D) in the dtype of `x`, contiguous; computed in float32 and rounded once.
"""
add_rms_norm = Operation(
    "add_rms_norm", _add_rms_norm_triton, normalise_sum(_rms_norm_torch),
    "x, added: real[*B, D]; weight: float32[D]? dense; eps",
    native=normalise_sum(rms_norm_native),
)  # fmt: skip
"""Compute `rms_norm` of x + added.

`added` has the shape and dtype of `x`, and any strides; the others are those of `rms_norm`.

Returns:
    x + added, rounded, and the norm of that; both like the result of `rms_norm`.
"""
rms_norm_backward = Operation(
    "rms_norm_backward", _rms_norm_backward_triton, _rms_norm_backward_torch,
    "grad_y, x: real[*B, D]; weight: float32[D]? dense; eps; other_grad: real[*B, D]?",
    native=rms_norm_backward_native,
)  # fmt: skip
"""Compute the gradient of x in `rms_norm`, and recompute its result.

`grad_y` has the shape and dtype of `x`, and any strides, and so has `other_grad`, the gradient
of `x` by another path: it is added before rounding. The others are those of `rms_norm`.

Returns:
    grad_x and y, each like the result of `rms_norm`.
"""

"""Gradients of an RMS norm of rows with trained gains: y = x * rsqrt(mean(x**2) + eps) * g.

With r = rsqrt(mean(x**2) + eps) and xhat = x * r: grad_x is that of `rms_norm`, and grad_g the sum
of gy * xhat over all rows. A program sums over its rows, and torch over programs, in a fixed order.
The backward returns y again, so that only x has to be saved.
"""

import torch
from torch import Tensor

from arbcli.kernels.norm.rms_norm import (
    WHOLE_ROW,
    dense_rows,
    load_rows,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_native,
    rms_norm_native,
    store_gradient,
    store_rows,
    tiling,
)
from arbcli.kernels.runtime.operation import Operation, tl, triton

MIN_TILES = 4
"""Minimum number of row tiles per program."""
MAX_PROGRAMS = 1024
"""Maximum number of programs: enough to fill a GPU, with few sums for torch to add."""


def _gained_rms_norm_backward_torch(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, y = rms_norm_backward.torch(grad_y, x, weight, eps, other_grad)
    _, xhat = rms_norm_backward.torch(grad_y, x.to(torch.float32), None, eps)
    return grad_x, y, _gradient_of_gain(grad_y, xhat)


def _gradient_of_gain(grad_y: Tensor, xhat: Tensor) -> Tensor:
    """Sum gy * xhat over rows, xhat float32; (D,) float32."""
    return (grad_y * xhat).flatten(0, -2).sum(dim=0)


def _gained_rms_norm_backward_native(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, y = rms_norm_backward_native(grad_y, x, weight, eps, other_grad)
    xhat = rms_norm_native(x.to(torch.float32), None, eps)
    return grad_x, y, _gradient_of_gain(grad_y, xhat)


@triton.jit
def _gained_rms_norm_backward_kernel(
    grad_y_ptr, x_ptr, gain_ptr, other_grad_ptr, grad_x_ptr, y_ptr, sums_ptr,
    M, D, eps, tiles,
    stride_ym, stride_xm, stride_bm,
    OTHER_GRAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    gain = tl.load(gain_ptr + offs_d, mask=offs_d < D, other=0)
    grad_gain = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)  # reduce over threads after the loop
    for tile in range(tiles):
        offs_m = ((program * tiles + tile) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (offs_m < M) & (offs_d < D)[None, :]
        x = load_rows(x_ptr, offs_m, offs_d, mask, stride_xm)
        grad_y = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym)
        r = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        xhat = x * r
        grad_gain += grad_y * xhat
        grad_xhat = grad_y * gain[None, :]
        mean = (tl.sum(xhat * grad_xhat, axis=1) / D)[:, None]
        grad_x = r * (grad_xhat - xhat * mean)
        store_gradient(
            grad_x_ptr, grad_x, offs_m, offs_d, mask, D, other_grad_ptr, stride_bm, OTHER_GRAD
        )
        store_rows(y_ptr, xhat * gain[None, :], offs_m, offs_d, mask, D)
    tl.store(sums_ptr + program * D + offs_d, tl.sum(grad_gain, axis=0), mask=offs_d < D)


def _gained_rms_norm_backward_triton(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    if not x.numel() or width > WHOLE_ROW:
        grad_x, y = rms_norm_backward.triton(grad_y, x, weight, eps, other_grad)
        return grad_x, y, _gradient_of_gain(grad_y, rms_norm.triton(x.float(), None, eps))
    grad_x, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    x, grad_y = dense_rows(x), dense_rows(grad_y)
    others = x if other_grad is None else dense_rows(other_grad)
    _, tile = tiling(len(x), width)
    del tile["WHOLE"]
    tiles = max(MIN_TILES, triton.cdiv(len(x), tile["BLOCK_M"] * MAX_PROGRAMS))
    programs = triton.cdiv(len(x), tile["BLOCK_M"] * tiles)
    sums = weight.new_empty(programs, width)
    _gained_rms_norm_backward_kernel[(programs,)](
        grad_y, x, weight, others, grad_x, y, sums, len(x), width, eps, tiles,
        grad_y.stride(0), x.stride(0), others.stride(0), OTHER_GRAD=other_grad is not None, **tile,
    )  # fmt: skip
    return grad_x, y, sums.sum(dim=0)


gained_rms_norm_backward = Operation(
    "gained_rms_norm_backward", _gained_rms_norm_backward_triton, _gained_rms_norm_backward_torch,
    "grad_y, x: real[*B, D]; weight: float32[D] dense; eps; other_grad: real[*B, D]?",
    native=_gained_rms_norm_backward_native,
)  # fmt: skip
"""Compute the gradients of `rms_norm` with gains, and recompute its result.

`grad_y` has the shape and dtype of `x`, and any strides, and so has `other_grad`, the gradient
of `x` by another path: it is added before rounding. The others are those of `rms_norm`.

Returns:
    grad_x and y, each like the result of `rms_norm`, and (D,) float32, the gradient of the
    gains.
"""

"""A short causal convolution of every channel: y[t, d] = sum over i of w[d, i] x[t - W + 1 + i, d].

x is zero before the first position. `reverse` uses later positions, x[t + W - 1 - i, d], which
computes the gradient of x.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.runtime.operation import Operation, tl, triton

MAX_TAPS = 8


def _shifted(x: Tensor, taps: int, reverse: bool) -> Iterator[Tensor]:
    """Return the input of each tap, shifted."""
    padded = functional.pad(x, (0, 0, 0, taps - 1) if reverse else (0, 0, taps - 1, 0))
    for i in range(taps):
        start = taps - 1 - i if reverse else i
        yield padded[:, start : start + x.shape[1]].float()


def _causal_conv_torch(x: Tensor, w: Tensor, reverse: bool = False) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap, part in zip(w.unbind(1), _shifted(x, w.shape[1], reverse), strict=True):
        y += tap * part
    return y.to(x.dtype)


def _causal_conv_grad_w_torch(grad_y: Tensor, x: Tensor, taps: int) -> Tensor:
    grads = [(grad_y.float() * part).sum(dim=(0, 1)) for part in _shifted(x, taps, False)]
    return torch.stack(grads, dim=1)


@triton.jit
def _causal_conv_kernel(
    x_ptr, w_ptr, y_ptr,
    T, D, stride_xb, stride_xt, stride_xd, stride_wd, stride_wi,
    TAPS: tl.constexpr, REVERSE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    y = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for i in tl.static_range(TAPS):
        source = t + TAPS - 1 - i if REVERSE else t - TAPS + 1 + i
        mask = (source >= 0) & (source < T) & (d < D)
        x_ptrs = x_ptr + b * stride_xb + source * stride_xt + d * stride_xd
        x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
        y += x * tl.load(w_ptr + d * stride_wd + i * stride_wi, mask=d < D, other=0)
    tl.store(y_ptr + (b * T + t) * D + d, y.to(y_ptr.dtype.element_ty), mask=(t < T) & (d < D))


@triton.jit
def _causal_conv_grad_w_kernel(
    grad_y_ptr, x_ptr, grad_w_ptr,
    T, D, stride_gb, stride_gt, stride_gd, stride_xb, stride_xt, stride_xd,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, i = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mask = (t < T) & (d < D)
        grad_ptrs = grad_y_ptr + b * stride_gb + t * stride_gt + d * stride_gd
        grad = tl.load(grad_ptrs, mask=mask, other=0).to(tl.float32)
        source = t - TAPS + 1 + i
        x_ptrs = x_ptr + b * stride_xb + source * stride_xt + d * stride_xd
        total += grad * tl.load(x_ptrs, mask=mask & (source >= 0), other=0).to(tl.float32)
    grad_w = tl.sum(total, axis=0)[None, :]
    tl.store(grad_w_ptr + (b * D + d) * TAPS + i, grad_w, mask=d < D)


def _causal_conv_triton(x: Tensor, w: Tensor, reverse: bool = False) -> Tensor:
    batch, length, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        block_t, block_d = 16, 128
        grid = triton.cdiv(length, block_t), triton.cdiv(width, block_d), batch
        _causal_conv_kernel[grid](
            x, w, y, length, width, *x.stride(), *w.stride(),
            TAPS=w.shape[1], REVERSE=reverse, BLOCK_T=block_t, BLOCK_D=block_d,
        )  # fmt: skip
    return y


def _causal_conv_grad_w_triton(grad_y: Tensor, x: Tensor, taps: int) -> Tensor:
    batch, length, width = x.shape
    parts = torch.empty(batch, width, taps, dtype=torch.float32, device=x.device)
    if parts.numel():
        _causal_conv_grad_w_kernel[(triton.cdiv(width, 64), batch, taps)](
            grad_y, x, parts, length, width, *grad_y.stride(), *x.stride(),
            TAPS=taps, BLOCK_T=32, BLOCK_D=64,
        )  # fmt: skip
    return parts.sum(dim=0)


causal_conv = Operation(
    "causal_conv", _causal_conv_triton, _causal_conv_torch,
    "x: real[B, T, D]; w: float32[D, W]; reverse",
    where=(f"0 < W <= {MAX_TAPS}",),
)  # fmt: skip
"""Convolve every channel with its causal taps.

Args:
    x: (B, T, D) float32 or bfloat16, any strides.
    w: (D, W) float32, W from 1 to 8.
    reverse: whether to look ahead instead.

Returns:
    Like x; summed in float32.
"""
causal_conv_grad_w = Operation(
    "causal_conv_grad_w", _causal_conv_grad_w_triton, _causal_conv_grad_w_torch,
    "grad_y, x: real[B, T, D]; taps",
    where=(f"0 < taps <= {MAX_TAPS}",),
)  # fmt: skip
"""Compute the gradient of the taps of `causal_conv`, (D, W) float32.

Args:
    grad_y: like x, any strides.
    x: as in `causal_conv`.
    taps: W.
"""

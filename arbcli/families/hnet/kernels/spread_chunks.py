"""Upsample chunks: add to every position the vector of its chunk, y[t] = x[t] + s[owner[t]].

The backward sums over a chunk's positions. It also returns the gradient of a factor c[t] = 1 of the
chunk's vector at each position, as a straight-through estimator needs it.

    grad_s[j] = sum over t of chunk j of grad_y[t]
    grad_c[t] = sum over d of grad_y[t] s[owner[t]]
"""

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.boundary_scores import WIDE
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, INT64, Array
from arbcli.kernels.runtime.operation import Operation


def _rows(owner: Tensor) -> Tensor:
    return torch.arange(len(owner), device=owner.device)[:, None]


def _spread_chunks_torch(x: Tensor, s: Tensor, owner: Tensor) -> Tensor:
    if not owner.numel():
        return torch.empty_like(x)
    return (x.float() + s[_rows(owner), owner]).to(x.dtype)


def _spread_chunks_backward_torch(
    grad_y: Tensor, s: Tensor, owner: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    grad_s = torch.zeros_like(s, memory_format=torch.contiguous_format)
    if not owner.numel():
        return grad_s, s.new_zeros(owner.shape)
    grad_y = grad_y.float()
    grad_c = (grad_y * s[_rows(owner), owner]).sum(dim=2)
    places = (owner + _rows(owner) * s.shape[1]).flatten()
    grad_s.view(-1, s.shape[2]).index_add_(0, places, grad_y.flatten(0, 1))
    return grad_s, grad_c


@triton.jit
def _spread_chunks_kernel(
    x_ptr, s_ptr, owner_ptr, y_ptr,
    T, D, stride_xb, stride_xt, stride_xd, stride_sb, stride_sc, stride_sd, stride_ob, stride_ot,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    mask = (t < T) & (d < D)
    chunk = tl.load(owner_ptr + b * stride_ob + t * stride_ot, mask=t < T, other=0)
    s = tl.load(s_ptr + b * stride_sb + chunk * stride_sc + d * stride_sd, mask=mask, other=0)
    x_ptrs = x_ptr + b * stride_xb + t * stride_xt + d * stride_xd
    y = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32) + s
    tl.store(y_ptr + (b * T + t) * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _spread_chunks_backward_kernel(
    grad_y_ptr, s_ptr, first_ptr, grad_s_ptr, grad_c_ptr,
    T, C, D, stride_yb, stride_yt, stride_yd, stride_sb, stride_sc, stride_sd,
    stride_fb, stride_fc,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.load(first_ptr + b * stride_fb + j * stride_fc)
    next_ptr = first_ptr + b * stride_fb + (j + 1) * stride_fc
    end = tl.load(next_ptr, mask=j + 1 < C, other=-1)
    # the last chunk has all remaining positions, an unused slot has none
    end = tl.where(end < 0, T, end)
    begin = tl.where(begin < 0, end, begin)
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    s = tl.load(s_ptr + b * stride_sb + j * stride_sc + d * stride_sd, mask=d < D, other=0)
    total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        grad_ptrs = grad_y_ptr + b * stride_yb + t * stride_yt + d * stride_yd
        grad = tl.load(grad_ptrs, mask=(t < end) & (d < D), other=0).to(tl.float32)
        total += grad
        grad_c = tl.sum(grad * s, axis=1)[:, None]
        tl.store(grad_c_ptr + b * T + t, grad_c, mask=t < end)
    grad_s = tl.sum(total, axis=0)[None, :]
    tl.store(grad_s_ptr + (b * C + j) * D + d, grad_s, mask=d < D)


def _spread_chunks_triton(x: Tensor, s: Tensor, owner: Tensor) -> Tensor:
    batch, length, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        block_t, block_d = 4, 256
        grid = triton.cdiv(length, block_t), triton.cdiv(width, block_d), batch
        _spread_chunks_kernel[grid](
            x, s, owner, y, length, width, *x.stride(), *s.stride(), *owner.stride(),
            BLOCK_T=block_t, BLOCK_D=block_d,
        )  # fmt: skip
    return y


def _spread_chunks_backward_triton(
    grad_y: Tensor, s: Tensor, owner: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    (batch, length, width), chunks = grad_y.shape, s.shape[1]
    grad_s = torch.empty(s.shape, dtype=torch.float32, device=s.device)
    grad_c = torch.empty(batch, length, dtype=torch.float32, device=s.device)
    if grad_s.numel():
        block_d = triton.next_power_of_2(width)
        _spread_chunks_backward_kernel[(chunks, batch)](
            grad_y, s, first, grad_s, grad_c, length, chunks, width,
            *grad_y.stride(), *s.stride(), *first.stride(),
            BLOCK_T=4, BLOCK_D=block_d, num_warps=16 if block_d > WIDE else 4,
        )  # fmt: skip
    return grad_s, grad_c


_OTHERS = {"s": Array("B, C, D", FLOAT), "owner": Array("B, T", INT64)}
spread_chunks = Operation(
    "spread_chunks", _spread_chunks_triton, _spread_chunks_torch,
    {"x": Array("B, T, D"), **_OTHERS},
)  # fmt: skip
"""Add to every position the vector of its chunk.

Args:
    x: (B, T, D) float32 or bfloat16, any strides.
    s: (B, C, D) float32, any strides.
    owner: (B, T) int64 in 0..C-1, from `chunking.find_chunks`.

Returns:
    (B, T, D) in the dtype of x; added in float32.
"""
spread_chunks_backward = Operation(
    "spread_chunks_backward", _spread_chunks_backward_triton, _spread_chunks_backward_torch,
    {"grad_y": Array("B, T, D"), **_OTHERS, "first": Array("B, C", INT64)},
)  # fmt: skip
"""Compute the gradients of `spread_chunks`, except that of x, which is `grad_y`.

Args:
    grad_y: (B, T, D) float32 or bfloat16, any strides.
    s: as in `spread_chunks`.
    owner: likewise.
    first: (B, C) int64, from `chunking.find_chunks`.

Returns:
    float32 gradients of s, (B, C, D), and of the factor at each position, (B, T).
"""

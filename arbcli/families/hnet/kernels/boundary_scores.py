"""Boundary probabilities of dynamic chunking: low cosine similarity with the previous position.

    p[t] = (1 - cos(u[t - 1], v[t])) / 2,   u = x + q,   v = x + k,   p[0] = 1

The paper initialises the projections to the identity. Here they are the identity plus a packed
projection, (q, k) = x @ w.T, which is initialised to zero. The cosine of a zero vector is 0.

Source: S. Hwang et al., "Dynamic Chunking for End-to-End Hierarchical Sequence Modeling",
https://arxiv.org/abs/2507.07955, eq. 4.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.operation import Operation, tl, triton

WIDE = 4096
"""Largest block of a row for four warps: with wider ones the compiler takes minutes, and spills."""

TINY = tl.constexpr(1e-6)
"""Added to squared norms."""


def _pairs(x: Tensor, qk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return u[t - 1] and v[t] for t from 1 on, in float32, and their norms."""
    q, k = qk.float().chunk(2, dim=2)
    u, v = (x.float() + q)[:, :-1], (x.float() + k)[:, 1:]
    length_u, length_v = ((part.square().sum(dim=2, keepdim=True) + 1e-6).sqrt() for part in (u, v))
    return u, v, length_u, length_v


def _boundary_scores_torch(x: Tensor, qk: Tensor) -> Tensor:
    p = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
    if x.shape[1] > 1:
        u, v, length_u, length_v = _pairs(x, qk)
        p[:, 1:] = (1 - (u * v / (length_u * length_v)).sum(dim=2)) / 2
    return p


def _boundary_scores_backward_torch(grad_p: Tensor, x: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[2]
    grad_qk = torch.zeros(qk.shape, dtype=torch.float32, device=x.device)
    if x.shape[1] > 1:
        u, v, length_u, length_v = _pairs(x, qk)
        u, v = u / length_u, v / length_v
        cos, half = (u * v).sum(dim=2, keepdim=True), -grad_p[:, 1:, None] / 2
        grad_qk[:, :-1, :width] = half * (v - cos * u) / length_u
        grad_qk[:, 1:, width:] = half * (u - cos * v) / length_v
    return (grad_qk[..., :width] + grad_qk[..., width:]).to(x.dtype), grad_qk.to(qk.dtype)


@triton.jit
def _load_sum(x_ptr, qk_ptr, t, offset, d, stride_xt, stride_xd, stride_qt, stride_qd, inside, D):
    """Load x + q of a block of positions, or x + k if the offset is D."""
    mask = inside & (d < D)
    x = tl.load(x_ptr + t * stride_xt + d * stride_xd, mask=mask, other=0).to(tl.float32)
    qk_ptrs = qk_ptr + t * stride_qt + (offset + d) * stride_qd
    return x + tl.load(qk_ptrs, mask=mask, other=0).to(tl.float32)


@triton.jit
def _inverse_length(u):
    return 1 / tl.sqrt(tl.sum(u * u, axis=1)[:, None] + TINY)


@triton.jit
def _boundary_scores_kernel(
    x_ptr, qk_ptr, p_ptr,
    T, D, stride_xb, stride_xt, stride_xd, stride_qb, stride_qt, stride_qd,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    x_ptr += b * stride_xb
    qk_ptr += b * stride_qb
    strides = (stride_xt, stride_xd, stride_qt, stride_qd)
    u = _load_sum(x_ptr, qk_ptr, t - 1, 0, d, *strides, (t > 0) & (t < T), D)
    v = _load_sum(x_ptr, qk_ptr, t, D, d, *strides, t < T, D)
    cos = tl.sum(u * v, axis=1)[:, None] * (_inverse_length(u) * _inverse_length(v))
    tl.store(p_ptr + b * T + t, tl.where(t == 0, 1.0, (1 - cos) / 2), mask=t < T)


@triton.jit
def _boundary_scores_backward_kernel(
    grad_p_ptr, x_ptr, qk_ptr, grad_x_ptr, grad_qk_ptr,
    T, D, stride_gb, stride_gt, stride_xb, stride_xt, stride_xd, stride_qb, stride_qt, stride_qd,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    x_ptr += b * stride_xb
    qk_ptr += b * stride_qb
    strides = (stride_xt, stride_xd, stride_qt, stride_qd)
    has_next = t + 1 < T
    grad_ptrs = grad_p_ptr + b * stride_gb + t * stride_gt
    # gradient of v[t], from position t - 1
    u = _load_sum(x_ptr, qk_ptr, t - 1, 0, d, *strides, (t > 0) & (t < T), D)
    v = _load_sum(x_ptr, qk_ptr, t, D, d, *strides, t < T, D)
    inverse_v = _inverse_length(v)
    u *= _inverse_length(u)
    v *= inverse_v
    grad = -tl.load(grad_ptrs, mask=(t > 0) & (t < T), other=0) / 2
    grad_v = grad * inverse_v * (u - tl.sum(u * v, axis=1)[:, None] * v)
    # gradient of u[t], from position t + 1
    u = _load_sum(x_ptr, qk_ptr, t, 0, d, *strides, t < T, D)
    v = _load_sum(x_ptr, qk_ptr, t + 1, D, d, *strides, has_next, D)
    inverse_u = _inverse_length(u)
    v *= _inverse_length(v)
    u *= inverse_u
    grad = -tl.load(grad_ptrs + stride_gt, mask=has_next, other=0) / 2
    grad_u = grad * inverse_u * (v - tl.sum(u * v, axis=1)[:, None] * u)
    mask = (t < T) & (d < D)
    dtype = grad_x_ptr.dtype.element_ty
    tl.store(grad_x_ptr + (b * T + t) * D + d, (grad_u + grad_v).to(dtype), mask=mask)
    grad_qk_ptrs = grad_qk_ptr + (b * T + t) * 2 * D + d
    tl.store(grad_qk_ptrs, grad_u.to(dtype), mask=mask)
    tl.store(grad_qk_ptrs + D, grad_v.to(dtype), mask=mask)


def _boundary_scores_triton(x: Tensor, qk: Tensor) -> Tensor:
    batch, length, width = x.shape
    p = torch.empty(batch, length, dtype=torch.float32, device=x.device)
    if p.numel():
        blocks = _blocks(width)
        _boundary_scores_kernel[(triton.cdiv(length, blocks["BLOCK_T"]), batch)](
            x, qk, p, length, width, *x.stride(), *qk.stride(), **blocks
        )
    return p


def _boundary_scores_backward_triton(
    grad_p: Tensor, x: Tensor, qk: Tensor
) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_qk = torch.empty(qk.shape, dtype=qk.dtype, device=x.device)
    if grad_x.numel():
        blocks = _blocks(width)
        _boundary_scores_backward_kernel[(triton.cdiv(length, blocks["BLOCK_T"]), batch)](
            grad_p, x, qk, grad_x, grad_qk, length, width,
            *grad_p.stride(), *x.stride(), *qk.stride(), **blocks,
        )  # fmt: skip
    return grad_x, grad_qk


def _blocks(width: int) -> dict[str, int]:
    block_d = triton.next_power_of_2(width)
    blocks = {"BLOCK_T": max(1, min(16, 2048 // block_d)), "BLOCK_D": block_d}
    return blocks | {"num_warps": 16 if block_d > WIDE else 4}


boundary_scores = Operation(
    "boundary_scores", _boundary_scores_triton, _boundary_scores_torch,
    "x: real[B, T, D]; qk: real[B, T, 2 * D]",
)  # fmt: skip
"""Compute the boundary probability of every position.

Args:
    x: (B, T, D) float32 or bfloat16, any strides.
    qk: (B, T, 2 D) in the dtype of x: q, then k.

Returns:
    (B, T) float32 in 0..1.
"""
boundary_scores_backward = Operation(
    "boundary_scores_backward", _boundary_scores_backward_triton, _boundary_scores_backward_torch,
    "grad_p: float32[B, T]; x: real[B, T, D]; qk: real[B, T, 2 * D]",
)  # fmt: skip
"""Compute the gradients of `boundary_scores`.

Args:
    grad_p: (B, T) float32, any strides.
    x: as in `boundary_scores`.
    qk: likewise.

Returns:
    Gradients of x and qk, in their shapes and dtypes.
"""

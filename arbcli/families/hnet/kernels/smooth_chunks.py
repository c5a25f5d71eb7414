"""Smooth the vectors of chunks: an exponential moving average weighted by boundary probability.

    s[j] = p[j] z[j] + (1 - p[j]) s[j - 1],   s[-1] = 0

At a boundary with low p, most of the previous chunk remains, so the result is continuous in p. In
the backward pass, with g[j] the total gradient of s[j]:

    g[j] = grad_s[j] + (1 - p[j + 1]) g[j + 1]
    grad_z[j] = p[j] g[j],   grad_p[j] = sum over d of g[j] (z[j] - s[j - 1])

Source: S. Hwang et al., "Dynamic Chunking for End-to-End Hierarchical Sequence Modeling",
https://arxiv.org/abs/2507.07955, eq. 5.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.operation import Operation, tl, triton


def _smooth_chunks_torch(z: Tensor, p: Tensor) -> Tensor:
    s = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    last = torch.zeros_like(s[:, :1])
    for j in range(z.shape[1]):
        share = p[:, j, None, None]
        last = share * z[:, j : j + 1].float() + (1 - share) * last
        s[:, j : j + 1] = last
    return s


def _smooth_chunks_backward_torch(
    grad_s: Tensor, z: Tensor, p: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    grad_z, grad_p = torch.empty_like(z, memory_format=torch.contiguous_format), p.new_empty(0)
    before = torch.cat((torch.zeros_like(s[:, :1]), s[:, :-1]), dim=1)[:, : s.shape[1]]
    whole = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    g = whole.new_zeros(len(whole), 1)
    for j in reversed(range(z.shape[1])):
        g = whole[:, j] = grad_s[:, j] + (g if j == z.shape[1] - 1 else (1 - p[:, j + 1, None]) * g)
    grad_p = (whole * (z.float() - before)).sum(dim=2)
    grad_z.copy_(p[..., None] * whole)
    return grad_z, grad_p


@triton.jit
def _compose(decay_a, sum_a, decay_b, sum_b):
    return decay_a * decay_b, sum_a * decay_b + sum_b


@triton.jit
def _smooth_chunks_kernel(
    z_ptr, p_ptr, s_ptr,
    C, D, stride_zb, stride_zc, stride_zd, stride_pb, stride_pc,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    offs = tl.arange(0, BLOCK_C)[:, None]
    d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    last = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = (start + offs).to(tl.int64)
        # beyond the last chunk, keep the previous state
        p = tl.load(p_ptr + b * stride_pb + c * stride_pc, mask=c < C, other=0)
        mask = (c < C) & (d < D)
        z_ptrs = z_ptr + b * stride_zb + c * stride_zc + d * stride_zd
        z = tl.load(z_ptrs, mask=mask, other=0).to(tl.float32)
        decay = tl.broadcast_to(1 - p, (BLOCK_C, BLOCK_D))
        decay, total = tl.associative_scan((decay, p * z), 0, _compose)
        s = decay * last + total
        tl.store(s_ptr + (b * C + c) * D + d, s, mask=mask)
        last = tl.sum(tl.where(offs == BLOCK_C - 1, s, 0), axis=0)[None, :]


@triton.jit
def _smooth_chunks_backward_kernel(
    grad_s_ptr, z_ptr, p_ptr, s_ptr, grad_z_ptr, grad_p_ptr,
    C, D, stride_gb, stride_gc, stride_gd, stride_zb, stride_zc, stride_zd, stride_pb, stride_pc,
    stride_sb, stride_sc, stride_sd,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_C)[:, None]
    d = (part * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    after = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = (C - 1 - start - offs).to(tl.int64)  # from the last chunk to the first
        mask = (c >= 0) & (d < D)
        p_ptrs = p_ptr + b * stride_pb + c * stride_pc
        p = tl.load(p_ptrs, mask=c >= 0, other=0)
        p_next = tl.load(p_ptrs + stride_pc, mask=(c >= 0) & (c + 1 < C), other=0)
        grad_ptrs = grad_s_ptr + b * stride_gb + c * stride_gc + d * stride_gd
        grad = tl.load(grad_ptrs, mask=mask, other=0).to(tl.float32)
        # g by a scan within the block, plus the decayed g of the block after it
        decay = tl.broadcast_to(1 - p_next, (BLOCK_C, BLOCK_D))
        decay, total = tl.associative_scan((decay, grad), 0, _compose)
        g = decay * after + total
        after = tl.sum(tl.where(offs == BLOCK_C - 1, g, 0), axis=0)[None, :]
        # gradients of the chunk, and of its probability for these columns
        z_ptrs = z_ptr + b * stride_zb + c * stride_zc + d * stride_zd
        z = tl.load(z_ptrs, mask=mask, other=0).to(tl.float32)
        s_ptrs = s_ptr + b * stride_sb + (c - 1) * stride_sc + d * stride_sd
        before = tl.load(s_ptrs, mask=mask & (c > 0), other=0)
        grad_z = (p * g).to(grad_z_ptr.dtype.element_ty)
        tl.store(grad_z_ptr + (b * C + c) * D + d, grad_z, mask=mask)
        grad_p = tl.sum(tl.where(mask, g * (z - before), 0), axis=1)[:, None]
        parts = tl.num_programs(0)
        tl.store(grad_p_ptr + (b * C + c) * parts + part, grad_p, mask=c >= 0)


def _smooth_chunks_triton(z: Tensor, p: Tensor) -> Tensor:
    batch, chunks, width = z.shape
    s = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    if s.numel():
        blocks = _blocks(chunks, width)
        _smooth_chunks_kernel[(triton.cdiv(width, blocks["BLOCK_D"]), batch)](
            z, p, s, chunks, width, *z.stride(), *p.stride(), **blocks
        )
    return s


def _blocks(chunks: int, width: int) -> dict[str, int]:
    """Choose tiles: small ones for small tensors, which saves time in the interpreter."""
    most_chunks, most_width = (min(32, triton.next_power_of_2(size)) for size in (chunks, width))
    return {"BLOCK_C": most_chunks, "BLOCK_D": most_width}


def _smooth_chunks_backward_triton(
    grad_s: Tensor, z: Tensor, p: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    batch, chunks, width = z.shape
    blocks = _blocks(max(chunks, 1), max(width, 1))
    parts = triton.cdiv(width, blocks["BLOCK_D"])
    grad_z = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    grad_p = torch.empty(batch, chunks, parts, dtype=torch.float32, device=z.device)
    if grad_z.numel():
        _smooth_chunks_backward_kernel[(parts, batch)](
            grad_s, z, p, s, grad_z, grad_p, chunks, width,
            *grad_s.stride(), *z.stride(), *p.stride(), *s.stride(), **blocks,
        )  # fmt: skip
    return grad_z, grad_p.sum(dim=2)


smooth_chunks = Operation(
    "smooth_chunks", _smooth_chunks_triton, _smooth_chunks_torch,
    "z: real[B, C, D]; p: float32[B, C]",
)  # fmt: skip
"""Compute the moving average of chunks.

Args:
    z: (B, C, D) float32 or bfloat16, any strides.
    p: (B, C) float32: weight of a chunk's own vector in its average.

Returns:
    (B, C, D) float32.
"""

smooth_chunks_backward = Operation(
    "smooth_chunks_backward", _smooth_chunks_backward_triton, _smooth_chunks_backward_torch,
    "grad_s: float32[B, C, D]; z: real[B, C, D]; p: float32[B, C]; s: float32[B, C, D]",
)  # fmt: skip
"""Compute the gradients of `smooth_chunks`.

Args:
    grad_s: (B, C, D) float32, any strides.
    z: as in `smooth_chunks`.
    p: likewise.
    s: the result of `smooth_chunks`.

Returns:
    Gradients of z, like it, and of p, float32.
"""

"""Causal attention whose weights are dropped in training, and its gradient.

With s = q . k / sqrt(d), p = softmax(s) over the keys up to the query and a mask r of dropout:

    y[m] = sum over n of p[m, n] r[m, n] v[n]

r is 1 / (1 - rate) or 0, and a function of the key of the mask, the number of the query among those
of all heads and texts, and the position of the key: forward and backward draw it again, and no
matrix of the size of p is stored. The backward is that of `causal_attention_backward`, in which r
multiplies the weights that reach `grad_v`, and the products g . v.
Sources: T. Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691, algorithm 1; N. Srivastava et
al., "Dropout", JMLR 15 (2014).
"""

import torch
from torch import Tensor

from arbcli.kernels.attention.causal_attention_backward import (
    LOG2_E,
    causal_attention_backward_torch,
    drop_weights,
    launch_backward,
    new_gradients,
    split_heads,
)
from arbcli.kernels.attention.rotary_norm import dense_heads
from arbcli.kernels.rows.dropout import dropout, mask_constants
from arbcli.kernels.runtime.operation import Operation, tl, triton


def _mask_of(q: Tensor, key: Tensor, rate: float) -> Tensor:
    """Compute r, (B, heads, T, T) float32."""
    batch, heads, length, _ = q.shape
    ones = torch.ones(batch * heads * length, length, device=q.device)
    return dropout.torch(ones, key, rate).view(batch, heads, length, length)


def _dropped_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    scores = q.float() @ k.float().mT * q.shape[3] ** -0.5
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    logs = scores.logsumexp(dim=-1)
    p = torch.exp(scores - logs[..., None])
    return (p * _mask_of(q, key, rate) @ v.float()).to(q.dtype), logs


def _dropped_attention_backward_torch(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor, key: Tensor,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return causal_attention_backward_torch(grad_y, q, k, v, y, logs, _mask_of(q, key, rate))


@triton.jit
def _dropped_attention_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, logs_ptr, key_ptr,
    T, H, scale, log2_e,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK  # blocks with the most keys first
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    m, d = first + tl.arange(0, BLOCK), tl.arange(0, D)
    row = (b * H + h) * T + m
    # queries of this block stay in registers
    wide_m = m.to(tl.int64)[:, None]
    q_ptrs = q_ptr + b * stride_qb + h * stride_qh + wide_m * stride_qt + d[None, :]
    q = tl.load(q_ptrs, mask=(m < T)[:, None], other=0)
    highest = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    y = tl.zeros((BLOCK, D), dtype=tl.float32)
    for start in range(0, first + BLOCK, BLOCK):
        n = start + tl.arange(0, BLOCK)
        known = (n < T)[:, None]
        wide_n = n.to(tl.int64)[:, None]
        k_ptrs = k_ptr + b * stride_kb + h * stride_kh + wide_n * stride_kt + d[None, :]
        v_ptrs = v_ptr + b * stride_vb + h * stride_vh + wide_n * stride_vt + d[None, :]
        k = tl.load(k_ptrs, mask=known, other=0)
        s = tl.dot(q, k.T, input_precision=PRECISION) * (scale * log2_e)
        s = tl.where(n[None, :] <= m[:, None], s, -float("inf"))
        # online softmax in powers of two: rescale what was summed to the new maximum
        above = tl.maximum(highest, tl.max(s, axis=1))
        p = tl.exp2(s - above[:, None])
        shrink = tl.exp2(highest - above)
        # the sum is that of all weights: dropout comes after the softmax
        total = total * shrink + tl.sum(p, axis=1)
        p = drop_weights(p, key_ptr, row[:, None], n[None, :], THRESHOLD, FACTOR)
        v = tl.load(v_ptrs, mask=known, other=0)
        y = tl.dot(p.to(v.dtype), v, y * shrink[:, None], input_precision=PRECISION)
        highest = above
    y_ptrs = y_ptr + row[:, None] * D + d[None, :]
    tl.store(y_ptrs, (y / total[:, None]).to(y_ptr.dtype.element_ty), mask=(m < T)[:, None])
    tl.store(logs_ptr + row, (highest + tl.log2(total)) / log2_e, mask=m < T)


def _dropped_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logs = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if y.numel():
        q, k, v = dense_heads(q, k, v)
        exact = q.dtype == torch.float32
        block = 16 if exact else 64
        _dropped_attention_kernel[triton.cdiv(length, block), heads, batch](
            q, k, v, y, logs, key, length, heads, width**-0.5, LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            D=width, BLOCK=block, PRECISION="ieee" if exact else "tf32", **mask_constants(rate),
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return y, logs


def _dropped_attention_backward_triton(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor, key: Tensor,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = new_gradients(q, q.shape[1])
    launch_backward(grads, (grad_y, q, k, v, y), logs, dropped=(key, rate))
    return split_heads(grads, q.shape[1])


_WHERE = ("16 <= D <= 128 and D & (D - 1) == 0", "0 <= rate < 1")

dropped_attention = Operation(
    "dropped_attention", _dropped_attention_triton, _dropped_attention_torch,
    "q, k, v: real[B, H, T, D]; key: int32[]; rate",
    where=_WHERE,
)  # fmt: skip
"""Attend causally with scores divided by sqrt(d), and drop weights.

Args:
    q: (B, heads, T, d) bfloat16 or float32, d a power of two from 16 to 128, any strides.
    k: likewise.
    v: likewise.
    key: int32 scalar tensor, from `stream_keys`.
    rate: probability that a weight is dropped, at least 0 and below 1.

Returns:
    y: (B, heads, T, d) in the dtype of q, contiguous.
    logs: (B, heads, T) float32, log-sum-exp of the scores of each query.
"""
dropped_attention_backward = Operation(
    "dropped_attention_backward", _dropped_attention_backward_triton,
    _dropped_attention_backward_torch,
    "grad_y, q, k, v, y: real[B, H, T, D]; logs: float32[B, H, T] dense; key: int32[]; rate",
    where=_WHERE,
)  # fmt: skip
"""Compute the gradients of `dropped_attention`.

Args:
    grad_y: (B, heads, T, d), gradient of y, any strides.
    q: as in `dropped_attention`.
    k: likewise.
    v: likewise.
    y: the result of `dropped_attention`, any strides.
    logs: likewise, contiguous.
    key: as in `dropped_attention`.
    rate: likewise.

Returns:
    Gradients of q, k and v, like them.
"""

"""Attention with dropout of its weights, in training."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.kernels.attention.dropped_attention import dropped_attention, dropped_attention_backward
from arbcli.kernels.runtime.backend import backend_of
from arbcli.model.layers.attend import positions_seen
from arbcli.model.layers.dropout import Mask, dropout

FUSED_WIDTHS = 16, 128
"""Range of the head widths, powers of two, of the fused kernels."""


def attend_dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    seen: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention with dropout of its weights.

    Plain causal attention on the Triton backend computes weights and mask again in the backward.
    Other attention stores both.

    Source: N. Srivastava et al., "Dropout", JMLR 15 (2014); of attention weights as in A. Vaswani
    et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762.

    Args:
        q: (B, heads, T, d).
        k: like q.
        v: like q.
        mask: dropout of the weights, of which it sees (B * heads * T, T).
        seen: attention mask, (T, T) or (B, 1, T, T) bool, True to attend; None is causal.
        sink: (heads,) float32, logit of a further position with value 0; None for no sink.
        scale: factor of the scores; None is 1 / sqrt(d).

    Returns:
        (B, heads, T, d).
    """
    length, width = q.shape[2:]
    fits = FUSED_WIDTHS[0] <= width <= FUSED_WIDTHS[1] and width & (width - 1) == 0
    is_plain = seen is None and sink is None and scale is None
    if fits and is_plain and not torch.compiler.is_compiling() and backend_of(q) == "triton":
        return _DroppedAttention.apply(q, k, v, *mask)
    if seen is None:
        seen = positions_seen(length, None, True, q.device)
    scores = (q @ k.mT).float() * (width**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    return dropout(scores.softmax(dim=-1)[..., :length].to(v.dtype), mask) @ v


class _DroppedAttention(Function):
    """Attention with dropout: the backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, key: Tensor, rate: float) -> Tensor:
        y, logs = dropped_attention(q, k, v, key, rate)
        ctx.save_for_backward(q, k, v, y, logs, key)
        ctx.rate = rate
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, logs, key = ctx.saved_tensors
        grads = dropped_attention_backward(grad_y, q, k, v, y, logs, key, ctx.rate)
        return *grads, None, None

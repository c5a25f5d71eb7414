"""Attention of dense blocks, by the fastest kernels that repeat their bits, and with sinks."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from arbcli.kernels.attention.causal_attention_backward import (
    causal_attention_backward,
    flash_attention_backward,
)
from arbcli.kernels.attention.rotary_attention_backward import parts_of, rotary_attention_backward
from arbcli.kernels.attention.rotary_norm import rotary_norm_
from arbcli.kernels.runtime.backend import capability, uses_triton
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.rotary import Angles, rotary_norm

HOPPER = (9, 0)
"""The compute capability whose kernels in cuDNN were found to be faster than torch's own."""
WIDTHS = (64, 128)
"""Of heads, for which that was measured."""
LENGTH_MULTIPLE = 64
"""Of positions: other lengths take masks in cuDNN."""

EXTRA = 8
"""Numbers that a sink adds to a head; kernels read so many at once."""


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from every position to itself and those before it, scores divided by sqrt(d).

    The bits of the result and of its gradients are the same every time. So of cuDNN only the
    forward is used: its backward adds up in any order, and torch has no switch for that. After it
    goes `causal_attention_backward`, or on the `torch` backend torch's flash attention.

    Args:
        q: (B, heads, T, d), any strides with the last one 1.
        k: like q.
        v: like q.

    Returns:
        (B, heads, T, d).
    """
    if torch.compiler.is_compiling() or not _takes_cudnn(q):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _CausalAttention.apply(q, k, v)


def attend_rotated(qkv: Tensor, angles: Angles) -> Tensor:
    """Turn and normalise queries and keys, see `rotary_norm`, and attend causally.

    Where our kernels compute attention's gradient, they go on to that of the turn.

    Args:
        qkv: (B, T, 3, heads, d) contiguous; overwritten.
        angles: of positions.

    Returns:
        (B, heads, T, d).
    """
    q, *_ = parts_of(qkv)
    if torch.compiler.is_compiling() or not (_takes_cudnn(q) and uses_triton(qkv)):
        return attend_causally(*rotary_norm(qkv, angles))
    return _RotaryAttention.apply(qkv, *angles)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each head of (B, heads, T, d) for the heads of queries that it serves."""
    if times == 1:
        return x
    return x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def attend_with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
    """Attend to positions, and to one more that has a logit of each head's own and no value.

    That position is a key after the others: `EXTRA` numbers are added to each head, two of which
    are the logit in queries, rounded and what rounding left, and ones in this key alone.

    Args:
        q: (B, heads, T, d).
        k: (B, heads, S, d).
        v: like k.
        sink: (heads,) float32.
        seen: (T, S) bool, or (B, 1, T, S), which positions each one attends to.

    Returns:
        (B, heads, T, d).
    """
    (batch, heads, length, width), (places, dtype) = q.shape, (k.shape[2], q.dtype)
    logit = (sink * width**0.5).view(1, heads, 1, 1).expand(batch, -1, length, -1)
    rounded = logit.to(dtype)
    left = (logit - rounded.float()).to(dtype)
    q = functional.pad(torch.cat((q, rounded, left), dim=-1), (0, EXTRA - 2))
    k, v = (functional.pad(part, (0, EXTRA, 0, 1)) for part in (k, v))
    k[:, :, places, width : width + 2] = 1
    seen = functional.pad(seen, (0, 1), value=True)
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=width**-0.5)
    return y[..., :width]


def attend_to(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, sink: Tensor | None
) -> Tensor:
    """Attend from new positions of a text to those that are kept of it, without gradients.

    Args:
        q: (1, H, T, d).
        keys: (heads, S, d), each for `H / heads` heads of queries.
        values: like keys.
        seen: (T, S) bool, which of them each one attends to; None is causal, of S = T.
        sink: (H,) float32, see `attend_with_sink`; None is none.

    Returns:
        (1, H, T, d).
    """
    shape, times = q.shape, q.shape[1] // len(keys)
    k, v = keys[None], values[None]
    if sink is not None:
        if seen is None:
            seen = torch.ones(shape[2], shape[2], dtype=torch.bool, device=q.device).tril()
        return attend_with_sink(q, repeat_heads(k, times), repeat_heads(v, times), sink, seen)
    if shape[2] == 1:  # queries of the heads that share keys are read as if they were positions
        q = q.view(1, len(keys), times, -1)
    else:
        k, v = repeat_heads(k, times), repeat_heads(v, times)
    attend = functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=seen, is_causal=seen is None).reshape(shape)


def _takes_cudnn(q: Tensor) -> bool:
    fits = q.shape[-1] in WIDTHS and q.shape[-2] % LENGTH_MULTIPLE == 0
    fits = fits and q.is_cuda and q.dtype == torch.bfloat16
    return fits and capability(q) == HOPPER and _has_cudnn()


@cache
def _has_cudnn() -> bool:
    """Whether this torch has cuDNN; where there is no GPU, as one is assumed, it is, too."""
    return not torch.cuda.is_available() or torch.backends.cudnn.is_available()


def _attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend causally: the result, and the logarithm of the sum of each query's exponentials."""
    y, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False
    )
    return y, logs.squeeze(-1)


class _CausalAttention(Function):
    """cuDNN's forward, whose sums are those that any backward takes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, logs = _attend_by_cudnn(q, k, v)
        ctx.save_for_backward(q, k, v, y, logs)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        backward = causal_attention_backward if uses_triton(grad_y) else flash_attention_backward
        return backward(grad_y, *ctx.saved_tensors)


class _RotaryAttention(Function):
    """The same of queries and keys that are made where they are, as `rotary_norm` does."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = rotary_norm_(qkv, cos, sin, NORM_EPS)
        y, logs = _attend_by_cudnn(*parts_of(qkv))
        ctx.save_for_backward(qkv, r, cos, sin, y, logs)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return rotary_attention_backward(grad_y, *ctx.saved_tensors), None, None

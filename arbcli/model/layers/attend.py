"""Causal attention by the fastest deterministic kernels, and attention with sinks."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from arbcli.kernels.attention.rotary_norm import rotary_norm_, unpack_qkv
from arbcli.kernels.runtime.backend import backend_of, capability
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.rotary import Angles, rotary_norm

HOPPER = (9, 0)
"""Compute capability on which cuDNN's attention is faster than torch's."""
WIDTHS = (64, 128)
"""Head widths for which that was measured."""
LENGTH_MULTIPLE = 64
"""cuDNN needs a mask for sequence lengths that are not a multiple."""

SHORT = 128
"""Maximum length for which torch's backward on a CPU is faster in float32 than in bfloat16."""
EXTRA = 8
"""Elements that a sink adds to the width of a head, for aligned vector loads."""


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention with scores divided by sqrt(d).

    Results and gradients are deterministic. Only the forward of cuDNN is used, as its backward sums
    in arbitrary order. The backward is `causal_attention_backward`, or torch's flash attention on
    the `torch` backend. On a CPU, gradients of short sequences are computed in float32.

    Args:
        q: (B, heads, T, d), any strides with the last one 1.
        k: (B, kv, T, d) likewise, each head for a group of those of q.
        v: like k.

    Returns:
        (B, heads, T, d).
    """
    compiled = torch.compiler.is_compiling()
    if not compiled and _takes_cudnn(q):
        return _CausalAttention.apply(q, k, v)
    k, v = (repeat_heads(part, q.shape[1] // part.shape[1]) for part in (k, v))
    is_short = q.is_cpu and q.requires_grad and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT
    if is_short and not compiled:
        return _ShortAttention.apply(q, k, v)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_rotated(qkv: Tensor, angles: Angles) -> Tensor:
    """Turn and normalise queries and keys, see `rotary_norm`, and attend causally.

    Where our kernels compute attention's gradient, they go on to that of the rotation.

    Args:
        qkv: (B, T, 3, heads, d) contiguous; overwritten.
        angles: angles of positions.

    Returns:
        (B, heads, T, d).
    """
    q, *_ = unpack_qkv(qkv)
    if torch.compiler.is_compiling() or not (_takes_cudnn(q) and backend_of(qkv) == "triton"):
        return attend_causally(*rotary_norm(qkv, angles))
    return _RotaryAttention.apply(qkv, *angles)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each key or value head of (B, heads, T, d) for the query heads of its group."""
    if times == 1:
        return x
    return x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def attend_with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, seen: Tensor | None) -> Tensor:
    """Compute attention with a sink: one more position with a logit for each head and value 0.

    The sink is appended as a key. The width of heads grows by `EXTRA`, with two elements in use:
    in queries the rounded logit and its rounding error, in the key of the sink two ones.

    Args:
        q: (B, heads, T, d).
        k: (B, heads, S, d).
        v: like k.
        sink: (heads,) float32.
        seen: attention mask, (T, S) or (B, 1, T, S) bool, True to attend; None is causal, S = T.

    Returns:
        (B, heads, T, d).
    """
    (batch, heads, length, width), (num_keys, dtype) = q.shape, (k.shape[2], q.dtype)
    logit = (sink * width**0.5).view(1, heads, 1, 1).expand(batch, -1, length, -1)
    rounded = logit.to(dtype)
    error = (logit - rounded.float()).to(dtype)
    q = functional.pad(torch.cat((q, rounded, error), dim=-1), (0, EXTRA - 2))
    k, v = (functional.pad(part, (0, EXTRA, 0, 1)) for part in (k, v))
    k[:, :, num_keys, width : width + 2] = 1
    if seen is None:
        seen = positions_seen(length, None, True, q.device)
    seen = functional.pad(seen, (0, 1), value=True)
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=width**-0.5)
    return y[..., :width]


def positions_seen(length: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """Return the attention mask of T positions, (T, T) bool, True to attend.

    Args:
        length: T.
        window: number of positions to attend to, including the position itself; None is unlimited.
        causal: whether to exclude later positions; else as many later positions are seen.
        device: device of the mask.
    """
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    distance = distance if causal else distance.abs()
    return (distance >= 0) & (distance < (window or length))


def attend_to(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, sink: Tensor | None
) -> Tensor:
    """Compute attention of new positions to cached keys and values, without gradients.

    Args:
        q: (1, H, T, d).
        keys: (heads, S, d), each for `H / heads` heads of queries.
        values: like keys.
        seen: attention mask, (T, S) bool; None is causal with S = T.
        sink: (H,) float32, see `attend_with_sink`; None for no sink.

    Returns:
        (1, H, T, d).
    """
    shape, times = q.shape, q.shape[1] // len(keys)
    k, v = keys[None], values[None]
    if sink is not None:
        return attend_with_sink(q, repeat_heads(k, times), repeat_heads(v, times), sink, seen)
    if shape[2] == 1:  # the query heads of a group take the place of positions
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
    """Return whether torch has cuDNN; True without a GPU, for predictions of one."""
    return not torch.cuda.is_available() or torch.backends.cudnn.is_available()


def _attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend causally: the result, and the logarithm of the sum of each query's exponentials."""
    y, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False
    )
    return y, logs.squeeze(-1)


class _CausalAttention(Function):
    """cuDNN's forward, whose log-sum-exp is also the input of other backwards."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, logs = _attend_by_cudnn(q, k, v)
        ctx.save_for_backward(q, k, v, y, logs)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from arbcli.kernels.attention.causal_attention_backward import (
            causal_attention_backward,
            flash_attention_backward,
        )

        backward = (
            causal_attention_backward
            if backend_of(grad_y) == "triton"
            else flash_attention_backward
        )
        return backward(grad_y, *ctx.saved_tensors)


class _ShortAttention(Function):
    """torch's attention on a CPU, with a backward in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, logs = attend(q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, y, logs)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        *inputs, logs = ctx.saved_tensors
        inputs = [part.float() for part in (grad_y, *inputs)]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(*inputs, logs, dropout_p=0.0, is_causal=True)
        return tuple(grad.to(grad_y.dtype) for grad in grads)


class _RotaryAttention(Function):
    """The same of queries and keys that are made where they are, as `rotary_norm` does."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = rotary_norm_(qkv, cos, sin, NORM_EPS)
        y, logs = _attend_by_cudnn(*unpack_qkv(qkv))
        ctx.save_for_backward(qkv, r, cos, sin, y, logs)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        from arbcli.kernels.attention.rotary_attention_backward import rotary_attention_backward

        return rotary_attention_backward(grad_y, *ctx.saved_tensors), None, None

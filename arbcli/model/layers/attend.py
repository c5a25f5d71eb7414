"""Causal attention of a dense block, by the fastest kernels that repeat their bits."""

from functools import cache

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from arbcli.kernels.attention.causal_attention_backward import (
    causal_attention_backward,
    flash_attention_backward,
)
from arbcli.kernels.runtime.backend import capability, uses_triton

HOPPER = (9, 0)
"""The compute capability whose kernels in cuDNN were found to be faster than torch's own."""
WIDTHS = (64, 128)
"""Of heads, for which that was measured."""
LENGTH_MULTIPLE = 64
"""Of positions: other lengths take masks in cuDNN."""


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from every position to itself and those before it, scores divided by sqrt(d).

    The bits of the result and of its gradients are the same every time. So of cuDNN only the
    forward is used: its backward adds up in any order, and torch has no switch for that. Behind it
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


def _takes_cudnn(q: Tensor) -> bool:
    fits = q.shape[-1] in WIDTHS and q.shape[-2] % LENGTH_MULTIPLE == 0
    fits = fits and q.is_cuda and q.dtype == torch.bfloat16
    return fits and capability(q) == HOPPER and _has_cudnn()


@cache
def _has_cudnn() -> bool:
    """Whether this torch has cuDNN; where there is no GPU, as one is assumed, it is, too."""
    return not torch.cuda.is_available() or torch.backends.cudnn.is_available()


class _CausalAttention(Function):
    """cuDNN's forward, whose sums are those that any backward takes."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, y, logs.squeeze(-1))
        return y

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        backward = causal_attention_backward if uses_triton(grad_y) else flash_attention_backward
        return backward(grad_y, *ctx.saved_tensors)

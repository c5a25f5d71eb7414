"""Differentiable dropout: the backward draws the mask again from the key."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.kernels.rows.dropout import dropout as drop
from arbcli.model.layers.compiled import operator


class _Dropout(Function):
    @staticmethod
    def forward(x: Tensor, key: Tensor, rate: float) -> Tensor:
        return drop(x.flatten(0, -2), key, rate).view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, key, ctx.rate = inputs
        ctx.save_for_backward(key)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        return drop(grad_y.flatten(0, -2), key, ctx.rate).view(grad_y.shape), None, None


_dropout = operator(
    _Dropout,
    fake=lambda x, _key, _rate: torch.empty_like(x),
    fake_grads=lambda grad_y: [torch.empty_like(grad_y)],
)


def dropout(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """Drop elements of (..., D): see `arbcli.kernels.rows.dropout`.

    Args:
        x: float32 or bfloat16; its leading dimensions are flattened to rows.
        key: int32 scalar tensor.
        rate: probability that an element is dropped.
    """
    return _dropout(x, key, rate)

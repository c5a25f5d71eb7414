"""Differentiable dropout: the backward draws the mask again from the key."""

from typing import Any, NamedTuple

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


class Dropout(NamedTuple):
    """Dropout of the outputs of branches, which are mixers and channel mixers, in training."""

    keys: Tensor
    """(branches,) int32, key of the mask of each branch."""
    rate: float
    """Probability that an element is dropped."""

    def of(self, first: int, branches: int) -> "Dropout":
        """Select consecutive branches."""
        return Dropout(self.keys[first : first + branches], self.rate)

    def drop(self, branch: int, x: Tensor) -> Tensor:
        """Drop elements of the output of a branch, (..., D): see `arbcli.kernels.rows.dropout`."""
        return _dropout(x, self.keys[branch], self.rate)

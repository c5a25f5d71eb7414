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


class Mask(NamedTuple):
    """A mask of dropout, drawn by kernels from its key."""

    key: Tensor
    """int32 scalar."""
    rate: float
    """Probability that an element is dropped."""


class Dropout(NamedTuple):
    """Dropout of branches, which are mixers and channel mixers, and of the embedding, in training.

    A rate of 0 drops nothing.
    """

    keys: Tensor
    """(branches,) int32, key of the mask of each branch's output."""
    rate: float
    """Probability that an element of a branch's output is dropped."""
    attention_keys: Tensor
    """(branches,) int32, key of the mask of each branch's attention weights."""
    attention_rate: float
    """Probability that an attention weight is dropped."""
    embedding: Mask | None
    """Mask of the embedding; None drops nothing."""

    def select(self, first: int, branches: int) -> "Dropout":
        """Select consecutive branches."""
        selected = slice(first, first + branches)
        return self._replace(keys=self.keys[selected], attention_keys=self.attention_keys[selected])

    @property
    def attention(self) -> Mask | None:
        """Mask of the attention weights of a single branch; None drops nothing."""
        return Mask(self.attention_keys[0], self.attention_rate) if self.attention_rate else None

    def drop(self, branch: int, x: Tensor) -> Tensor:
        """Drop elements of the output of a branch, (..., D)."""
        return dropout(x, Mask(self.keys[branch], self.rate)) if self.rate else x

    def drop_embedding(self, x: Tensor) -> Tensor:
        """Drop elements of the output of the embedding, (B, T, D)."""
        return x if self.embedding is None else dropout(x, self.embedding)


def dropout(x: Tensor, mask: Mask) -> Tensor:
    """Drop elements of (..., D): see `arbcli.kernels.rows.dropout`.

    Args:
        x: float32 or bfloat16; its leading dimensions are flattened to rows.
        mask: key and rate.
    """
    return _dropout(x, mask.key, mask.rate)

"""Differentiable mixing of residual streams."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.streams.kernels.mix_streams import mix_streams as mix
from arbcli.families.streams.kernels.mix_streams import mix_streams_backward, mix_streams_torch
from arbcli.families.streams.kernels.stream_weights import stream_weights as make_weights
from arbcli.families.streams.kernels.stream_weights import (
    stream_weights_backward,
    stream_weights_torch,
)
from arbcli.model.layers.compiled import KeepsInputs, operator


class _StreamWeights(KeepsInputs):
    @staticmethod
    def forward(raw: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return make_weights(raw, bias)

    @staticmethod
    def backward(
        ctx: Any, grad_a: Tensor, grad_b: Tensor, grad_c: Tensor
    ) -> tuple[Tensor | None, ...]:
        raw, bias = ctx.saved_tensors
        grad = stream_weights_backward(grad_a, grad_b, grad_c, raw, bias)
        return grad.to(raw.dtype), grad.sum(dim=0)


class _MixStreams(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None) -> Tensor:
        return mix(x, weights, added, gains)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grads = mix_streams_backward(grad_y, *ctx.saved_tensors)
        return *grads, *[None] * (4 - len(grads))


stream_weights, mix_streams = operator(_StreamWeights), operator(_MixStreams)


def functions_for(spec: LayerSpec) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """Return `stream_weights` and `mix_streams`; those of float baselines are in plain torch.

    See the kernels of these names in `arbcli.families.streams.kernels`.
    """
    if spec.weights == "ternary":
        return stream_weights, mix_streams
    return stream_weights_torch, mix_streams_torch


def spread_streams(x: Tensor, streams: int) -> Tensor:
    """Expand (B, T, D) to n equal streams, (B, T, n, D)."""
    return x[:, :, None].expand(-1, -1, streams, -1)


def average_streams(x: Tensor) -> Tensor:
    """Average streams (B, T, n, D) to (B, T, D), with float32 accumulation."""
    return torch.mean(x, dim=2, dtype=torch.float32).to(x.dtype)

"""The router, which mixes the streams of the model's parts for each position."""

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.model.layers.kinds import layers_for

ROUTER_BIAS = 3.0
"""Bias of the score of the blocks' stream, which already contains the others."""


class Router(nn.Module):
    """Computes a softmax-weighted sum of streams for each position."""

    draws = ("norm", "scores")

    def __init__(self, streams: int, spec: LayerSpec) -> None:
        super().__init__()
        layers = layers_for(spec)
        self.norm = layers.norm(spec.dim, spec)
        self.scores = layers.linear(streams, spec.dim, spec, area="router")

    def forward(self, *streams: Tensor) -> Tensor:
        """Mix streams, (B, T, D) each; the first one determines the weights, mostly its own."""
        first, *others = self.scores(streams[0], self.norm).float().unbind(dim=-1)
        scores = torch.stack((first + ROUTER_BIAS, *others), dim=-1)
        weights = torch.softmax(scores, dim=-1).to(streams[0].dtype)
        mixed = weights[..., :1] * streams[0]
        for index, stream in enumerate(streams[1:], 1):
            mixed = mixed + weights[..., index, None] * stream
        return mixed

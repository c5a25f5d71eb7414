"""A memory layer with product keys: exact top-k of millions of rows without scoring all of them.

A query and the key of a row have two halves: row i * n + j has the half keys i and j, and its score
is the sum of their scores. The best rows are among the pairs of the best half keys, so the
selection is exact. Source: G. Lample et al., "Large Memory Layers with Product Keys",
https://arxiv.org/abs/1907.05242; V.-P. Berges et al., "Memory Layers at Scale",
https://arxiv.org/abs/2412.09764.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.graph.config import CodebookConfig
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.table import TableWeight


class CodebookOutput(NamedTuple):
    """Result of a codebook for a stream of (B, T, D)."""

    y: Tensor
    """(B, T, D), output to add to the stream."""
    codes: Tensor
    """(B, T) int64, the best row of the first head."""
    confidence: Tensor
    """(B, T) float32, weight of the best row."""
    cost: Tensor | None = None
    """Commitment loss of a quantiser, a scalar: mean squared distance from the code."""


def alive_gauge(area: str, share: float) -> dict[str, float]:
    """Return the share of a codebook's rows that are in use, by the name of the gauge."""
    return {"alive_codes" if area == "codebook" else f"alive_{area}": share}


def top_pairs(left: Tensor, right: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Select the pairs with the largest sums of scores.

    Args:
        left: (M, n1) scores.
        right: (M, n2) scores.
        top_k: number of pairs, at most n1 and n2.

    Returns:
        Scores, (M, top_k) float32 in descending order, and pairs i * n2 + j, int64.
    """
    scores, index = zip(*(half.float().topk(top_k) for half in (left, right)), strict=True)
    sums = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
    best, pair = sums.topk(top_k)
    i, j = index[0].gather(1, pair // top_k), index[1].gather(1, pair % top_k)
    return best, i * right.shape[1] + j


class Codebook(nn.Module):
    """Memory layer: softmax-weighted sum of each head's top-k rows, concatenated and projected.

    Args:
        config: configuration of heads, keys and rows.
        spec: storage settings and width of the stage.
        area: parameter group of the tensors.
    """

    draws = ("norm", "query", "query_norm", "left", "right", "table", "sub_norm", "output")

    def __init__(self, config: CodebookConfig, spec: LayerSpec, area: str) -> None:
        super().__init__()
        layers, self.area = layers_for(spec), area
        self.heads, self.key_dim, self.top_k = config.heads, config.key_width, config.top_k
        halves, width, values_dim = config.halves, config.width, config.heads * config.width
        self.norm = layers.norm(spec.dim, spec)
        self.query = layers.linear(config.heads * 2 * config.key_width, spec.dim, spec, area=area)
        self.query_norm = layers.norm(config.key_width, spec)
        self.left = layers.linear(halves[0], config.key_width, spec, area=area)
        self.right = layers.linear(halves[1], config.key_width, spec, area=area)
        self.table = layers.table(halves[0] * halves[1], width, spec, area=area)
        self.sub_norm = layers.norm(values_dim, spec)
        self.output = layers.output(values_dim, spec, area=area)

    def forward(self, x: Tensor) -> CodebookOutput:
        """Look up the memory for a stream, (B, T, D)."""
        batch, length, _ = x.shape
        query = self.query(x, self.norm).view(-1, 2, self.key_dim)  # (B * T * heads, 2, key_dim)
        halves = self.left(query[:, 0], self.query_norm), self.right(query[:, 1], self.query_norm)
        scores, rows = top_pairs(*halves, self.top_k)
        weights = torch.softmax(scores, dim=1)
        values = self.table(rows, weights, x.dtype).view(batch, length, -1)
        shape = (batch, length, self.heads, self.top_k)
        codes, confidence = (part.view(shape)[:, :, 0, 0] for part in (rows, weights))
        return CodebookOutput(self.output(values, self.sub_norm), codes, confidence)

    def gauges(self) -> dict[str, float]:
        """Return the share of rows that a step has changed; synchronises with the device.

        Empty for a float baseline, which does not count uses.
        """
        weight = self.table.weight
        return alive_gauge(self.area, weight.alive()) if isinstance(weight, TableWeight) else {}

"""The text sequencer: hashed embeddings of the n-grams that end at a position."""

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.graph.config import SequencerConfig
from arbcli.model.layers.kinds import layers_for
from arbcli.model.ngrams import ngram_ids

ORDERS = (2, 3, 4)
"""Lengths of the n-grams that end at each position."""


class TextSequencer(nn.Module):
    """The projected sum of the hashed embeddings of a position's 2-, 3- and 4-grams."""

    draws = ("table", "norm", "projection")

    def __init__(self, config: SequencerConfig, spec: LayerSpec) -> None:
        super().__init__()
        layers, self.rows = layers_for(spec), config.rows
        self.table = layers.table(config.rows, config.width, spec, area="sequencer")
        self.norm = layers.norm(config.width, spec)
        self.projection = layers.linear(spec.dim, config.width, spec, area="sequencer")

    def forward(self, text: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Look up the n-grams that end at the last positions.

        Args:
            text: (B, history + T) int64 bytes, negative before the text.
            length: T.
            dtype: dtype of the result.

        Returns:
            (B, T, D), output to add to the stream.
        """
        rows = ngram_ids(text, self.rows, ORDERS)
        weights = torch.ones(rows.shape, device=text.device)
        y = self.table(rows.flatten(0, 1), weights.flatten(0, 1), dtype)
        return self.projection(y.view(*text.shape, -1), self.norm)[:, -length:]

"""The text sequencer: what a position's last bytes say together, before any block."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.graph import GraphConfig
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.layers.table import TernaryTable

ORDERS = (2, 3, 4)
"""Lengths of the n-grams that end at each position."""
HISTORY = max(ORDERS) - 1
"""Bytes before a position that its n-grams have."""
MIX = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio in 64 bits, as a signed integer. Source: D. Knuth, TAOCP 3, 6.4."""


def ngram_ids(ids: Tensor, num_rows: int, orders: tuple[int, ...] = ORDERS) -> Tensor:
    """Hash the n-grams that end at each byte to rows of a table.

    Args:
        ids: (B, T) int64 bytes; a negative one is before the beginning of the text.
        num_rows: of the table.
        orders: lengths of the n-grams.

    Returns:
        (B, T, len(orders)) int64 in 0..num_rows-1, or -1 for an n-gram that begins before the text.
    """
    found, key, complete = [], torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
    for back in range(max(orders)):
        byte = functional.pad(ids, (back, 0), value=-1)[:, : ids.shape[1]]
        key, complete = key * 257 + byte + 1, complete & (byte >= 0)
        if back + 1 in orders:
            mixed = (key + ((back + 1) << 40)) * MIX
            row = (((mixed >> 32) & 0x7FFFFFFF) * num_rows) >> 31  # by the high bits, the best ones
            found.append(torch.where(complete, row, -1))
    return torch.stack(found, dim=-1)


class TextSequencer(nn.Module):
    """The sum of the rows that a position's 2-, 3- and 4-grams are hashed to, projected."""

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        self.table = TernaryTable(config.ngram_rows, config.ngram_dim, config, area="sequencer")
        self.norm = TernaryRMSNorm(config.ngram_dim, config)
        about = {"area": "sequencer"}
        self.projection = TernaryLinear(config.dim, config.ngram_dim, config, **about)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn (B, T) int64 bytes, negative ones before the text, into (B, T, D) features."""
        rows = ngram_ids(ids, self.table.weight.out_features)
        weights = torch.ones(rows.shape, device=ids.device)
        y = self.table(rows.flatten(0, 1), weights.flatten(0, 1), dtype)
        return self.projection(y.view(*ids.shape, -1), self.norm)

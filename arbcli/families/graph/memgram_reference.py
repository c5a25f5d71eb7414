"""An integer memory of the byte that followed each n-gram."""

import torch
from torch import Tensor

from arbcli.families.graph.sequencer_reference import ngram_row, ngrams
from arbcli.verify.parts.base import Reading, Weights, norm

ORDER = 6


def memgram(w: Weights, reading: Reading) -> Tensor:
    """Compute what the memory of each 6-gram adds to the embedding, (T, D)."""
    symbol, strength = reading.memory("symbol"), reading.memory("strength")
    row_numbers = [ngram_row(history, len(symbol)) for history in ngrams(reading.text, ORDER)]
    rows = torch.tensor(row_numbers, device=symbol.device)
    held = strength[rows.clamp(min=0)].long() * (rows >= 0)
    recalled = torch.where(held > 0, symbol[rows.clamp(min=0)].long() + 128, 0)
    recalled_output = norm(w["table"][recalled], w.get("norm")) @ w["output"].T
    return (held.double() / 127).sqrt()[:, None] * recalled_output

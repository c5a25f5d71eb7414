"""A hashed memory of n-grams: the byte that follows each, and its strength, in two bytes per entry.

An entry holds the prevailing next byte of the n-grams that are hashed to it. The same byte
increments its strength, another one decrements it, and replaces the byte at zero: a majority vote
over a stream. Source: R. Boyer and J. Moore, "MJRTY: A Fast Majority Vote Algorithm", 1981.
"""

import torch
from torch import Tensor

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.model import VOCABULARY
from arbcli.families.graph.config import MemGramConfig
from arbcli.model.layers.kinds import layers_for
from arbcli.model.ngrams import ngram_ids
from arbcli.model.packed_model import StepMemory

ORDER = 6
"""Length of the n-grams."""
INT8_MAX = 127


class MemGram(StepMemory):
    """Embeds the remembered next byte of the last 6 bytes, weighted by its strength.

    Buffers, one element for each entry:
        symbol: int8, the byte minus 128.
        strength: int8, 0..127; 0 marks an empty entry.
    """

    draws = ("table", "norm", "output")
    symbol: Tensor
    strength: Tensor

    def __init__(self, config: MemGramConfig, spec: LayerSpec) -> None:
        super().__init__(area="memgram")
        for name in ("symbol", "strength"):
            self.declare(name, torch.zeros(config.rows, dtype=torch.int8), "counters")
        layers = layers_for(spec)
        self.table = layers.table(VOCABULARY, spec.dim, spec, area="memgram")
        self.norm = layers.norm(spec.dim, spec)
        self.output = layers.output(spec.dim, spec, area="memgram")

    def forward(self, text: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Look up the remembered next bytes.

        Args:
            text: (B, history + T) int64 bytes, negative before the text.
            length: T.
            dtype: dtype of the result.

        Returns:
            (B, T, D), output to add to the stream.
        """
        entries = ngram_ids(text, len(self.symbol), (ORDER,))[..., 0]
        if torch.is_grad_enabled() and text.shape[1] > 1:
            self.record("ngrams", torch.stack((entries[:, :-1], text[:, 1:])).flatten(1))
        entries = entries[:, -length:].reshape(-1, 1)  # (B * T, 1)
        index = entries.clamp(min=0)
        strength = self.strength[index].float() / INT8_MAX * (entries >= 0)
        symbols = torch.where(strength > 0, self.symbol[index].long() + 128, -1)
        y = self.output(self.table(symbols, torch.ones_like(strength), dtype), self.norm)
        # the strength is applied after the norm, which would cancel it
        return (y * strength.sqrt().to(dtype)).view(len(text), length, -1)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Update the entries from the step's n-grams; for each entry only the last one counts."""
        if "ngrams" not in self.records:
            return
        entries, symbols = torch.cat(self.records["ngrams"], dim=1)
        self.forget()
        size = len(self.symbol)
        index = torch.arange(len(entries), device=entries.device)
        slots = torch.where(entries < 0, size, entries)
        last = torch.full((size + 1,), -1, device=entries.device)
        last = last.scatter_reduce_(0, slots, index, "amax")[:size]
        new = (symbols[last.clamp(min=0)] - 128).to(torch.int8)
        agrees, is_updated = (new == self.symbol) & (self.strength > 0), last >= 0
        strength = self.strength.int()
        replaced = is_updated & ~agrees & (strength <= 1)
        updated = torch.where(agrees, (strength + 1).clamp(max=INT8_MAX), strength - 1)
        strength = torch.where(replaced, 1, torch.where(is_updated, updated, strength))
        self.symbol.copy_(torch.where(replaced, new, self.symbol))
        self.strength.copy_(strength)

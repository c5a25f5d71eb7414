"""Choices that one way to read a text hands to another, which adds in another order.

Scores of an indexer that are equal but for their rounding are ordered by last bits. What is chosen
otherwise moves all that follows by far more than rounding, so both ways take the same entries, and
those that a way would have chosen must score as high.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from arbcli.families.compressed.attention import CompressedAttention, Indexer
from arbcli.families.compressed.state import CompressedState
from arbcli.model.language_model import LanguageModel


class Chosen:
    """Entries that an indexer selects for the groups of a text, from the first group on."""

    def __init__(self) -> None:
        self.entries = torch.empty(0, 0, dtype=torch.int32)
        """(groups, k), -1 where there are fewer."""
        self.scores = torch.empty(0, 0, dtype=torch.float64)
        """(groups, entries)."""

    def take(self, q: Tensor, w: Tensor, keys: Tensor, entries: Tensor) -> None:
        """Take what was selected for one text by (1, N, h, d), (1, N, h) and (1, E, d)."""
        dots = torch.einsum("nhd,jd->nhj", q[0].double(), keys[0].double())
        self.entries = entries[0]
        self.scores = (dots.relu() * w[0].double()[..., None]).sum(dim=1)

    def hand(self, group: int, instead: Tensor) -> Tensor:
        """Return what was selected for a group, (k), for what scores as high."""
        entries, size = torch.full_like(instead, -1), min(len(instead), self.entries.shape[1])
        entries[:size] = self.entries[group, :size]
        both = [
            self.scores[group][choice.clamp(min=0).long()].masked_fill(choice < 0, -1).sort().values
            for choice in (instead, entries)
        ]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
        return entries


@contextmanager
def chosen_by(model: LanguageModel) -> Iterator[dict[Indexer, Chosen]]:
    """Record what the indexers of a model select in a forward of one text."""
    chosen: dict[Indexer, Chosen] = {}
    choose = Indexer.choose

    def note(self, q, w, keys, first, most, **options):
        entries = choose(self, q, w, keys, first, most, **options)
        chosen[self] = Chosen()
        chosen[self].take(q, w, keys, entries)
        return entries

    with mock.patch.object(Indexer, "choose", note):
        yield chosen
    parts = (part for part in model.modules() if isinstance(part, CompressedAttention))
    assert {*chosen} == {part.indexer for part in parts if part.indexer}


@contextmanager
def handed(chosen: dict[Indexer, Chosen]) -> Iterator[None]:
    """Hand these entries to the caches of the same text, of which none is too old to be seen."""
    choose, choose_next = Indexer.choose, CompressedState.choose

    def choose_some(self, q, w, keys, first, most, **options):
        entries = choose(self, q, w, keys, first, most, **options)
        groups = enumerate(entries[0], first - 1)
        return torch.stack([chosen[self].hand(n, choice) for n, choice in groups])[None]

    def choose_one(self, query, key):
        choose_next(self, query, key)
        groups, open_bytes = divmod(int(self.clock.position) + 1, self.ratio)
        if not open_bytes:
            self.choice.copy_(chosen[self.layer.indexer].hand(groups - 1, self.choice))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Indexer, "choose", choose_some))
        stack.enter_context(mock.patch.object(CompressedState, "choose", choose_one))
        yield

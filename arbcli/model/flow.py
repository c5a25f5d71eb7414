"""Values that pass through the blocks of a model: the stream, and inputs besides."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.model.parts.ngrams import ngram_keys


def rows_of(x: Tensor) -> list[Tensor]:
    """Split (B, ...) into B tensors of (1, ...).

    Each has memory of its own: how a kernel adds up may depend on where its input begins.
    """
    return [row.clone() for row in x.split(1)]


def each_text(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute something of a position of each text by itself, (B, 1, ...).

    So the bits of a text do not depend on the others, whatever kernels `run` has.
    """
    return run(x) if len(x) == 1 else torch.cat([run(row) for row in rows_of(x)])


Losses = dict[str, list[Tensor]]
"""Float32 scalars by the name of the loss that they are parts of."""


def merge(*losses: Losses) -> Losses:
    """Put the parts of each loss into one list, in this order."""
    found: Losses = {}
    for each in losses:
        for name, parts in each.items():
            found.setdefault(name, []).extend(parts)
    return found


class Flow(NamedTuple):
    """The stream after a part; nothing of it is changed in place."""

    x: Tensor
    """(B, T, D), or (B, T, n, D) of several residual streams."""
    added: Tensor | None = None
    """A tensor still to be added to x; the norm of the next part adds it at no cost."""
    losses: Losses = {}  # noqa: RUF012  # never changed

    def whole(self) -> Tensor:
        """Return the stream with what is still to be added."""
        return self.x if self.added is None else self.x + self.added


class Documents(NamedTuple):
    """Documents that lie one after another in windows, and know nothing of each other."""

    seen: Tensor
    """(B, 1, T, T) bool: whether a position attends to another, which is of its document and not
    after it."""

    @classmethod
    def of(cls, numbers: Tensor) -> "Documents":
        """Tell them apart by (B, T) integers, which number of the window each position is of."""
        length = numbers.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=numbers.device).tril()
        return cls(((numbers[:, :, None] == numbers[:, None]) & seen)[:, None])

    def within(self, window: int | None) -> Tensor:
        """Leave out what is `window` positions or more before."""
        if window is None or window >= self.seen.shape[-1]:
            return self.seen
        return self.seen.triu(1 - window)


class Reading(NamedTuple):
    """Inputs of parts besides the stream, re-based for the positions of each stage."""

    places: Tensor | None = None
    """(B, T) int64, the byte that each position stands for, -1 for an empty slot; None where
    positions are bytes."""
    grams: Tensor | None = None
    """(B, T) int64, keys of the n-grams that end at each position; None where nothing reads them.
    """
    documents: Documents | None = None
    """None where a window is one text."""

    @classmethod
    def of_text(cls, text: Tensor, length: int) -> "Reading":
        """Read the n-grams of a text.

        Args:
            text: (B, history + T) int64 bytes, negative before the text.
            length: T.
        """
        return cls(grams=ngram_keys(text)[:, -length:])

    @property
    def valid(self) -> Tensor | None:
        """(B, T) bool, which slots hold a position; None is all of them."""
        return None if self.places is None else self.places >= 0

    def of(self, text: int) -> "Reading":
        """Take what is read of one of several texts."""
        places, grams = (
            None if part is None else part[text : text + 1] for part in (self.places, self.grams)
        )
        return Reading(places, grams)

    def at(self, first: Tensor) -> "Reading":
        """Re-base to chunks that begin at these positions, (B, C) int64, -1 for an empty slot."""
        index = first.clamp(min=0)
        grams = None if self.grams is None else self.grams.gather(1, index)
        places = index if self.places is None else self.places.gather(1, index)
        return Reading(places.masked_fill(first < 0, -1), grams)


def project(
    layer: nn.Module, x: Tensor, norm: nn.Module | None, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Multiply the normalised sum of the stream and what is still to be added to it.

    Returns:
        The product, and the sum.
    """
    return (layer(x, norm), x) if added is None else layer(x, norm, added)

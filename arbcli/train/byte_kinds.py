"""Kinds of the bytes of a text: text, or parts of sounds and pictures with their headers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arbcli.config.parts.composite import KINDS
from arbcli.data import Text
from arbcli.infer.media import parts_of


class ByteKinds:
    """Tells the kinds of the bytes of windows of a text, as numbers of `KINDS`."""

    def __init__(self, text: Text) -> None:
        parts = [*parts_of(text)]
        edges = [edge for part in parts for edge in (part.start, part.stop)]
        self._edges = torch.tensor(edges, dtype=torch.int64, device="cpu")
        of_parts = (KINDS.index(part.header.kind) for part in parts)
        # of the text before the first part, of that part, of the text after it, and so on
        kinds = [0, *(kind for own in of_parts for kind in (own, 0))]
        self._kinds = torch.tensor(kinds, device="cpu")

    def windows(self, starts: Sequence[int], length: int) -> Tensor:
        """Tell those of the windows of `length` bytes that begin at `starts`: (B, length) int64."""
        places = torch.tensor(starts, device="cpu")[:, None] + torch.arange(length, device="cpu")
        return self._kinds[torch.bucketize(places, self._edges, right=True)]

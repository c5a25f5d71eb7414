"""Classification of a text's bytes as text, sound or picture (including headers)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arbcli.data.text import Text
from arbcli.families.media.config import KINDS
from arbcli.families.media.evaluation import find_parts


class ByteKinds:
    """Looks up the kinds of the bytes of a text, as indices into `KINDS`."""

    def __init__(self, text: Text) -> None:
        parts = [*find_parts(text)]
        edges = [edge for part in parts for edge in (part.start, part.stop)]
        self._edges = torch.tensor(edges, dtype=torch.int64, device="cpu")
        media_kinds = (KINDS.index(part.header.kind) for part in parts)
        # kinds of the text before the first part, the first part, the text after it, and so on
        kinds = [0, *(kind for media_kind in media_kinds for kind in (media_kind, 0))]
        self._kinds = torch.tensor(kinds, device="cpu")

    def windows(self, starts: Sequence[int], length: int) -> Tensor:
        """Return the kinds in windows of `length` bytes from `starts`, (B, length) int64."""
        positions = torch.tensor(starts, device="cpu")[:, None] + torch.arange(length, device="cpu")
        return self._kinds[torch.bucketize(positions, self._edges, right=True)]

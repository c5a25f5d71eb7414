"""Loss of the sounds and pictures in a text, compared with lossless formats."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap

import torch
from torch import Tensor

from arbcli.data.text import Text
from arbcli.families.media.pictures import decode_pixels, encoded_bytes
from arbcli.families.media.sound import decode_samples, flac_bytes
from arbcli.families.media.spans import Header, SoundHeader, find_spans
from arbcli.generation.evaluation import KindLoss


@dataclass(frozen=True, slots=True)
class MediaPart:
    """The part of a sound or picture that is in a text; offsets are relative to the text."""

    header: Header
    body: int
    """Offset of the body; it may be before the part, and negative."""
    start: int
    stop: int

    @property
    def body_range(self) -> tuple[int, int]:
        """Offset and length of the body in the part, from its first complete frame or row."""
        size = self.header.item_bytes
        first = self.body + max(0, -(-(self.start - self.body) // size)) * size
        return first, max(0, self.stop - first)


def is_mostly_media(text: Text) -> bool:
    """Return whether sounds and pictures are more than half of a text."""
    return sum(part.stop - part.start for part in find_parts(text)) > len(text) / 2


class MediaLosses:
    """Accumulates the losses of each sound and picture, and of the text between them.

    Sounds may be partially contained in the text. Incomplete pictures count as text.

    Args:
        text: bytes; the first one is not predicted, and counts as eight bits.
        device: device of the losses.
    """

    def __init__(self, text: Text, device: torch.device) -> None:
        self.text, self.parts = text, list(find_parts(text))
        edges = [edge for part in self.parts for edge in (part.start, part.stop)]
        self._edges = torch.tensor(edges, dtype=torch.int64, device=device)
        # sums of the text before the first part, the first part, the text after it, and so on
        self._sums = torch.zeros(len(edges) + 1, dtype=torch.float64, device=device)

    def add(self, starts: Sequence[int], losses: Tensor, is_counted: Tensor) -> None:
        """Add the losses of a batch of windows.

        Args:
            starts: B offsets of windows in the text.
            losses: (B, T) nats, from the second byte of the window.
            is_counted: (B, T) bool mask of the losses to add.
        """
        if not self.parts:
            return
        offsets = torch.arange(1, losses.shape[1] + 1, device=losses.device)
        positions = torch.tensor(starts, device=losses.device)[:, None] + offsets
        interval = torch.bucketize(positions[is_counted], self._edges, right=True)
        # deterministic, unlike `bincount` on a GPU
        self._sums.index_add_(0, interval, losses[is_counted].double())

    def report(self) -> tuple[KindLoss, ...]:
        """Return the loss by kind, in the order text, sound, picture; empty for plain text."""
        if not self.parts:
            return ()
        sums = self._sums.tolist()
        sums[1 if self.parts[0].start == 0 else 0] += math.log(256)  # the first byte
        losses = []
        if size := len(self.text) - sum(part.stop - part.start for part in self.parts):
            nats = sum(sums[::2]) / size
            losses.append(KindLoss(kind="text", bytes=size, nats_per_byte=nats))
        for kind, unit in (("sound", "sample"), ("picture", "pixel")):
            parts = [
                (part, nats)
                for part, nats in zip(self.parts, sums[1::2], strict=True)
                if part.header.kind == kind
            ]
            if parts:
                losses.append(self._kind_loss(kind, unit, parts))
        return tuple(losses)

    def _kind_loss(self, kind: str, unit: str, parts: list[tuple[MediaPart, float]]) -> KindLoss:
        units, sizes = 0, list[dict[str, int]]()
        for part, _ in parts:
            body, header = self.text.read(*part.body_range), part.header
            sizes.append({})
            with suppress(ImportError):  # optional packages
                if isinstance(header, SoundHeader):
                    values = decode_samples(body, header)
                    units += values.size
                    sizes[-1] = {"FLAC": flac_bytes(values, header.rate)}
                else:
                    units += header.units
                    sizes[-1] = encoded_bytes(decode_pixels(body, header))
        peers = {
            name: sum(counts[name] for counts in sizes)
            for name in sizes[0]
            if all(name in counts for counts in sizes)
        }
        size = sum(part.stop - part.start for part, _ in parts)
        nats = sum(nats for _, nats in parts)
        return KindLoss(
            kind=kind,
            bytes=size,
            nats_per_byte=nats / size,
            unit=unit,
            units=units,
            bits_per_unit=nats / math.log(2) / max(units, 1),
            peer_bits_per_unit={name: 8 * count / max(units, 1) for name, count in peers.items()}
            or None,
        )


def find_parts(text: Text) -> Iterator[MediaPart]:
    """Yield the sounds in a text, possibly partial, and its complete pictures."""
    offset = 0
    for path, start, stop in text.pieces:
        shift = offset - start
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            for span in find_spans(content):  # type: ignore[arg-type]  # `re` takes any buffer
                is_complete = start <= span.start and span.stop <= stop
                is_sound = span.header.kind == "sound"
                if is_complete or (is_sound and span.start < stop and start < span.stop):
                    first, last = max(span.start, start), min(span.stop, stop)
                    yield MediaPart(span.header, span.body + shift, first + shift, last + shift)
        offset += stop - start

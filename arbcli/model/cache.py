"""What a model has read of a text: the states of its parts, and the last bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.model.parts.ngrams import HISTORY
from arbcli.model.state import Track

if TYPE_CHECKING:
    from arbcli.model.language_model import LanguageModel


class Cache:
    """The states of one text, allocated once.

    Args:
        model: that reads the text.
        positions: bytes that the text can have.
        stored: float8_e4m3fn or int8, to keep keys and values in eight bits; None is the dtype of
            activations.
    """

    def __init__(
        self, model: "LanguageModel", positions: int, *, stored: torch.dtype | None = None
    ) -> None:
        slots, about = model.config.slots, (model.compute_dtype, model.device, stored)
        self.positions = positions
        self.stages = [
            stage.new_state(positions, ctx, *about)
            for stage, ctx in zip(model.stages, slots, strict=False)
        ]
        self.main = model.blocks.new_track(positions, slots[-1], *about)
        self.history: Tensor | None = None
        """(1, `HISTORY`) int64, the last bytes, where a part reads them."""
        if model.config.beside or model.config.reads_text:
            self.history = torch.full((1, HISTORY), -1, dtype=torch.int64, device=model.device)
        clocks = [track.clock for track in self.tracks]
        self.window = min(clock.window for clock in clocks)
        """Bytes that can be read at once, at most."""

    @property
    def tracks(self) -> list[Track]:
        """The states of all lists of blocks, the outermost first."""
        outer = [track for stage in self.stages for track in (stage.encoder, stage.decoder)]
        return [*outer, self.main]

    @property
    def nbytes(self) -> int:
        """Bytes that the states take."""
        return sum(track.nbytes for track in self.tracks)

    @property
    def position(self) -> Tensor:
        """Bytes read; a step reads it on the device, and nobody waits for it."""
        return self.tracks[0].position

    def depths(self) -> Tensor:
        """Count the stages that began a chunk at each byte that was read last: (T,) int64."""
        counts = torch.zeros_like(self.stages[0].begins[0], dtype=torch.int64)
        places = torch.arange(len(counts), device=counts.device)
        for stage in self.stages:
            places = places[stage.begins[0]]
            if not len(places):  # what is inside has read nothing
                break
            counts[places] += 1
        return counts

    def reset(self) -> None:
        """Begin a new text."""
        for part in (*self.stages, self.main):
            part.reset()

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[Tensor]:
        """Remember the last bytes of a text, where a part reads them.

        Args:
            ids: (1, T) int64, the bytes that are read inside.

        Yields:
            (1, history + T) int64: the bytes with those before them, negative where there are none.
        """
        if self.history is None:
            yield ids
            return
        # the first byte of a text forgets those of a text before it, as captured steps start anew
        before = torch.where(self.position == 0, -1, self.history)
        text = torch.cat((before, ids), dim=1)
        yield text
        self.history.copy_(text[:, ids.shape[1] :])


class SeveralCache:
    """The states of several texts, whose steps are computed together.

    Args:
        model: that `makes_several`.
        texts: B, how many.
        positions: bytes that the longest text can have.
        device: where it is; None is the model's.
    """

    def __init__(
        self,
        model: "LanguageModel",
        texts: int,
        positions: int,
        device: torch.device | None = None,
    ) -> None:
        about = (model.compute_dtype, device or model.device, None, texts)
        self.main = model.blocks.new_track(positions, model.config.ctx, *about)
        self.positions, self.window = positions, self.main.clock.window
        self.texts = [OneOfSeveral(self, index) for index in range(texts)]
        """The cache of each text, to read its prompt by itself."""

    @property
    def position(self) -> Tensor:
        """Bytes read of each text, (B,) int32."""
        return self.main.position

    @property
    def going_on(self) -> Tensor:
        """(B,) int32: 1 where a step reads one byte more of a text, 0 where it leaves it alone."""
        return self.main.clock.going_on

    @property
    def nbytes(self) -> int:
        """Bytes that the states take."""
        return self.main.nbytes

    def reset(self) -> None:
        """Begin new texts."""
        self.main.reset()

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[Tensor]:
        """Let a byte more of each text that goes on be read.

        Raises:
            ValueError: more than one byte.
        """
        if ids.shape[1] != 1:
            raise ValueError(f"several texts are read one byte at a time, got {ids.shape[1]}")
        yield ids


class OneOfSeveral(Cache):
    """The part of a `SeveralCache` that belongs to one text, as a cache by itself."""

    def __init__(self, whole: SeveralCache, index: int) -> None:
        self.positions, self.window = whole.positions, whole.window
        self.stages, self.history, self.main = [], None, whole.main.of(index)

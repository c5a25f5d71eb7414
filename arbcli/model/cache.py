"""The state of a text: the states of the parts, and the last bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_ahead import Kept
from arbcli.model.mark import Mark, Written
from arbcli.model.parts.ngrams import HISTORY
from arbcli.model.state import KeptTexts, Track

if TYPE_CHECKING:
    from arbcli.model.language_model import LanguageModel


class _Markable:
    """States from which positions can be taken back: see `mark`."""

    is_marked = False
    """Whether positions that are read can be taken back."""
    _marks: tuple[Mark, ...] = ()
    _marked = _read = 0

    def mark(self, positions: int) -> None:
        """Mark where texts are, so that positions after it can be taken back.

        Memory for that, part of `nbytes`, is kept for the next mark of as many positions. Steps
        that a captured graph replays are not seen and cannot be taken back.

        Args:
            positions: that are read after the mark, at most.
        """
        if not (self._marks and self._marked == positions):
            self._marks = tuple(self._new_marks(positions))
        self._marked, self._read, self.is_marked = positions, 0, True

    def rewind(self, accepted: int | Tensor) -> None:
        """Take back the positions after the mark but for the first ones, and remove the mark.

        Every tensor is what it would be had the others never been read. Nobody waits for it.

        Args:
            accepted: how many positions stay, at most as many as were read; of several texts (B,)
                integers on the device. A text that goes on for fewer steps than others has read so
                many.

        Raises:
            ValueError: there is no mark, or more is accepted than was read.
        """
        if not self.is_marked:
            raise ValueError("there is no mark to rewind to: call `mark` first")
        if isinstance(accepted, int):
            if not 0 <= accepted <= self._read:
                raise ValueError(f"{accepted} of {self._read} positions cannot be accepted")
            accepted = torch.tensor(accepted, device=self.position.device)
        if self._read:
            accepted = accepted.long().expand(self.position.shape).reshape(-1)
            for mark in self._marks:
                mark.rewind(accepted, self._read)
        self.is_marked = False

    @property
    def position(self) -> Tensor:
        """Positions read."""
        raise NotImplementedError

    @property
    def reads_at_once(self) -> bool:
        """Whether a marked text takes several positions at once, or one after another."""
        return len(self._marks) == 1 and self._marks[0].reads_at_once

    def _new_marks(self, positions: int) -> Iterator[Mark]:
        raise NotImplementedError

    def _save(self, length: int) -> None:
        if not self.is_marked:
            return
        if self._read + length > self._marked:
            raise ValueError(f"no more than {self._marked} positions can be read after the mark")
        for mark in self._marks:
            mark.save(self._read, length)
        self._read += length

    @property
    def _mark_bytes(self) -> int:
        return sum(mark.nbytes for mark in self._marks)


class Cache(_Markable):
    """The states of one text, or of several, allocated once.

    Args:
        model: that reads the text.
        positions: bytes that the text can have.
        texts: B, how many have steps that are computed together; None is one text by itself.
        device: where it is; None is the model's.
        first: position before which none is read: those before it are counted only.
    """

    def __init__(
        self,
        model: "LanguageModel",
        positions: int,
        *,
        texts: int | None = None,
        device: torch.device | None = None,
        first: int = 0,
    ) -> None:
        device, slots = device or model.device, model.config.slots
        self.positions = positions
        kept = KeptTexts(positions, model.compute_dtype, device, texts, model.kept, first)
        self.stages = [
            stage.new_state(ctx, kept) for stage, ctx in zip(model.stages, slots, strict=False)
        ]
        self.main = model.blocks.new_track(slots[-1], kept)
        self.history: Tensor | None = None
        """(B, `HISTORY`) int64, the last bytes, where a part reads them; B is 1 of one text."""
        if model.config.beside or model.config.reads_text:
            self.history = torch.full((texts or 1, HISTORY), -1, dtype=torch.int64, device=device)
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
        """Bytes that the states and a mark take."""
        return sum(track.nbytes for track in self.tracks) + self._mark_bytes

    def _new_marks(self, positions: int) -> Iterator[Mark]:
        for stage in self.stages:
            yield stage.encoder.mark(positions, *stage.written())
            yield stage.decoder.mark(positions)
        yield self.main.mark(positions, *([] if self.history is None else [Written(self.history)]))

    def kept(self, positions: int) -> list[Kept]:
        """Name the rings, and what a `LanguageModel.check` of so many positions leaves for them."""
        states = (state for state in self.main.blocks if state)
        return [part for state in states for part in state.kept(positions)]

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
            ids: (B, T) int64, the bytes that are read inside; B is 1 of one text.

        Yields:
            (B, history + T) int64: the bytes with those before them, negative where there are none.
        """
        self._save(ids.shape[1])
        if self.history is None:
            yield ids
            return
        # the first byte of a text forgets those of a text before it, as captured steps start anew
        before = torch.where(self.position.view(-1, 1) == 0, -1, self.history)
        text = torch.cat((before, ids), dim=1)
        yield text
        self.history.copy_(self._kept_of(text[:, ids.shape[1] :]))

    def _kept_of(self, history: Tensor) -> Tensor:
        return history


class SeveralCache(Cache):
    """The states of several texts, whose steps are computed together.

    Args:
        model: that reads the texts.
        texts: B, how many.
        positions: bytes that the longest text can have.
        device: where it is; None is the model's.
    """

    def __init__(
        self,
        model: "LanguageModel",
        texts: int,
        positions: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(model, positions, texts=texts, device=device)
        inside = [*(stage.clock for stage in self.stages[1:]), self.main.clock]
        for stage, clock in zip(self.stages, inside, strict=False):
            stage.inner = clock
        self.texts = [OneOfSeveral(self, index) for index in range(texts)]
        """The cache of each text, to read its prompt by itself."""

    @property
    def going_on(self) -> Tensor:
        """(B,) int32: 1 where a step reads one byte more of a text, 0 where it leaves it alone."""
        going_on = self.tracks[0].clock.going_on
        if going_on is None:
            raise ValueError("the clock only counts one text")
        return going_on

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[Tensor]:
        """Let a byte more of each text that goes on be read: see `Cache.reading`.

        Raises:
            ValueError: more than one byte.
        """
        if ids.shape[1] != 1:
            raise ValueError(f"several texts are read one byte at a time, got {ids.shape[1]}")
        with super().reading(ids) as text:
            yield text

    def _kept_of(self, history: Tensor) -> Tensor:
        if self.history is None:
            return history
        return torch.where(self.going_on[:, None] > 0, history, self.history)


class OneOfSeveral(Cache):
    """The part of a `SeveralCache` that belongs to one text, as a cache by itself."""

    def __init__(self, whole: SeveralCache, index: int) -> None:
        self.positions, self.window = whole.positions, whole.window
        self.stages = [stage.each[index] for stage in whole.stages]
        self.main = whole.main.each[index]
        self.history = None if whole.history is None else whole.history[index : index + 1]

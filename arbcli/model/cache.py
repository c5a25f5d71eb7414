"""The decoding cache of a text, or of a batch of texts: states of all parts, and the last bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.kernels.attention.kept import Kept
from arbcli.model.mark import Mark, Written
from arbcli.model.ngrams import HISTORY
from arbcli.model.state import StateSpec, Track

if TYPE_CHECKING:
    from arbcli.model.language_model import LanguageModel


class _Markable:
    """A cache whose last positions can be undone: see `mark`."""

    is_marked = False
    """Whether there is a mark to rewind to."""
    _marks: tuple[Mark, ...] = ()
    _marked = _read = 0

    def mark(self, positions: int) -> None:
        """Mark the present positions, so that `rewind` can undo later ones.

        The memory for it, part of `nbytes`, is reused by the next mark for the same number of
        positions. Steps that a captured graph replays are not recorded and cannot be undone.

        Args:
            positions: maximum number of positions that are read after the mark.
        """
        if not (self._marks and self._marked == positions):
            self._marks = tuple(self._new_marks(positions))
        self._marked, self._read, self.is_marked = positions, 0, True

    def rewind(self, accepted: int | Tensor) -> None:
        """Undo the positions after the mark except for the first `accepted`, and remove the mark.

        Every tensor is as if the other positions had never been read. Does not synchronise.

        Args:
            accepted: number of positions to keep, at most as many as were read; (B,) integers on
                the device for a batch, whose texts may have read different numbers of positions.

        Raises:
            ValueError: there is no mark, or `accepted` exceeds the positions read.
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
        """Number of positions read."""
        raise NotImplementedError

    @property
    def reads_at_once(self) -> bool:
        """Whether a marked text can read several positions at once rather than one by one."""
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
    """The states of one text, or of a batch of texts, allocated once.

    Args:
        model: the model that reads the text.
        positions: maximum length of the text in bytes.
        texts: batch size B; None for a single text, whose tensors have no batch dimension.
        device: device of the states; None is the model's.
        first: first position that is read; earlier ones are only counted.

    Raises:
        ArbError: the model is masked, and does not generate from left to right.
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
        if model.config.is_masked:
            raise ArbError(
                "this model is masked and cannot generate text from left to right",
                hint="fill holes: `arb generate RUN --infill TEXT`",
            )
        device, slots = device or model.device, model.config.slots
        self.positions = positions
        spec = StateSpec(positions, model.compute_dtype, device, texts, model.cache_format, first)
        self.stages = [
            stage.new_state(ctx, spec) for stage, ctx in zip(model.stages, slots, strict=False)
        ]
        self.main = model.blocks.new_track(slots[-1], spec)
        self.history: Tensor | None = None
        """The last bytes, (B, `HISTORY`) int64, if a part reads them; B is 1 for a single text."""
        if model.config.beside or model.config.reads_text:
            self.history = torch.full((texts or 1, HISTORY), -1, dtype=torch.int64, device=device)
        clocks = [track.clock for track in self.tracks]
        self.window = min(clock.window for clock in clocks)
        """Maximum number of bytes that can be read at once."""

    @property
    def tracks(self) -> list[Track]:
        """The states of all stacks of blocks, outermost first."""
        outer = [track for stage in self.stages for track in (stage.encoder, stage.decoder)]
        return [*outer, self.main]

    @property
    def nbytes(self) -> int:
        """Memory of the states and a mark in bytes."""
        return sum(track.nbytes for track in self.tracks) + self._mark_bytes

    def _new_marks(self, positions: int) -> Iterator[Mark]:
        for stage in self.stages:
            yield stage.encoder.mark(positions, *stage.written())
            yield stage.decoder.mark(positions)
        yield self.main.mark(positions, *([] if self.history is None else [Written(self.history)]))

    def kept(self, positions: int) -> list[Kept]:
        """Return the rings, each with the keys and values that a `check` of `positions` leaves."""
        states = (state for state in self.main.blocks if state)
        return [part for state in states for part in state.kept(positions)]

    @property
    def position(self) -> Tensor:
        """Number of bytes read, a tensor on the device."""
        return self.tracks[0].position

    def depths(self) -> Tensor:
        """Return the number of stages that began a chunk at each byte read last, (T,) int64."""
        counts = torch.zeros_like(self.stages[0].begins[0], dtype=torch.int64)
        places = torch.arange(len(counts), device=counts.device)
        for stage in self.stages:
            places = places[stage.begins[0]]
            if not len(places):  # inner stages read no position
                break
            counts[places] += 1
        return counts

    def reset(self) -> None:
        """Begin a new text."""
        for part in (*self.stages, self.main):
            part.reset()

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[Tensor]:
        """Prepend the last bytes to those read in the block, and keep the history up to date.

        Args:
            ids: (B, T) int64, the bytes read in the block; B is 1 for a single text.

        Yields:
            (B, history + T) int64: history and bytes; negative before the beginning of the text.
        """
        self._save(ids.shape[1])
        if self.history is None:
            yield ids
            return
        # captured steps begin a new text by setting the position to 0, without a reset
        before = torch.where(self.position.view(-1, 1) == 0, -1, self.history)
        text = torch.cat((before, ids), dim=1)
        yield text
        self.history.copy_(self._updated_history(text[:, ids.shape[1] :]))

    def _updated_history(self, history: Tensor) -> Tensor:
        return history


class BatchCache(Cache):
    """The states of a batch of texts, which are decoded together.

    Args:
        model: the model that reads the texts.
        texts: batch size B.
        positions: maximum length of a text in bytes.
        device: device of the states; None is the model's.
        first: first position of any text that is read.
    """

    def __init__(
        self,
        model: "LanguageModel",
        texts: int,
        positions: int,
        *,
        device: torch.device | None = None,
        first: int = 0,
    ) -> None:
        super().__init__(model, positions, texts=texts, device=device, first=first)
        inside = [*(stage.clock for stage in self.stages[1:]), self.main.clock]
        for stage, clock in zip(self.stages, inside, strict=False):
            stage.inner = clock
        self.texts = [TextCache(self, index) for index in range(texts)]
        """One cache for each text, to read its prompt; views of the same tensors."""

    @property
    def active(self) -> Tensor:
        """Mask of the texts that a step continues, (B,) int32, 1 or 0."""
        active = self.tracks[0].clock.active
        if active is None:
            raise ValueError("the clock belongs to a single text")
        return active

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[Tensor]:
        """Read one byte of each active text: see `Cache.reading`.

        Raises:
            ValueError: `ids` has more than one byte for each text.
        """
        if ids.shape[1] != 1:
            raise ValueError(f"a batch of texts is read one byte at a time, got {ids.shape[1]}")
        with super().reading(ids) as text:
            yield text

    def _updated_history(self, history: Tensor) -> Tensor:
        if self.history is None:
            return history
        return torch.where(self.active[:, None] > 0, history, self.history)


class TextCache(Cache):
    """A view of one text in a `BatchCache`."""

    def __init__(self, batch: BatchCache, index: int) -> None:
        self.positions, self.window = batch.positions, batch.window
        self.stages = [stage.each[index] for stage in batch.stages]
        self.main = batch.main.each[index]
        self.history = None if batch.history is None else batch.history[index : index + 1]

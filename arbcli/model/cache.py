"""The decoding cache of a text, or of a batch of texts: states of all parts, and the last bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.kernels.attention.decode_attention import SpeculativeRings
from arbcli.model.decoding import forward_with_cache
from arbcli.model.state import StateSpec, Track

if TYPE_CHECKING:
    from arbcli.model.language_model import LanguageModel


class Cache:
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
                "fill holes: `arb generate RUN --infill TEXT`",
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
            from arbcli.model.ngrams import HISTORY

            self.history = torch.full((texts or 1, HISTORY), -1, dtype=torch.int64, device=device)
        self.window = min(track.clock.window for track in self.tracks)
        """Maximum number of bytes that can be read at once."""

    texts: "list[TextCache] | None" = None
    """A view of each text of a batch, to read its prompt; None for a single text."""

    def forward(self, model: "LanguageModel", ids: Tensor) -> Tensor:
        """Compute logits of new positions: see `LanguageModel.forward`."""
        return forward_with_cache(model, ids, self)

    @property
    def tracks(self) -> list[Track]:
        """The states of all stacks of blocks, outermost first."""
        outer = [track for stage in self.stages for track in (stage.encoder, stage.decoder)]
        return [*outer, self.main]

    @property
    def nbytes(self) -> int:
        """Memory of the states in bytes."""
        return sum(track.nbytes for track in self.tracks)

    def speculative_rings(self, positions: int) -> list[SpeculativeRings]:
        """Return the rings, each with the keys and values that a `check` of `positions` leaves."""
        states = (state for state in self.main.blocks if state)
        return [part for state in states for part in state.speculative_rings(positions)]

    @property
    def position(self) -> Tensor:
        """Number of bytes read, an int32 scalar tensor on the device; (B,) for a batch of texts."""
        return self.tracks[0].position

    def depths(self) -> Tensor:
        """Return the number of stages that began a chunk at each byte read last, (T,) int64."""
        counts = torch.zeros_like(self.stages[0].begins[0], dtype=torch.int64)
        position_ids = torch.arange(len(counts), device=counts.device)
        for stage in self.stages:
            position_ids = position_ids[stage.begins[0]]
            if not len(position_ids):  # inner stages read no position
                break
            counts[position_ids] += 1
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
        if self.history is None:
            yield ids
            return
        # captured steps begin a new text by setting the position to 0, without a reset
        history = torch.where(self.position.view(-1, 1) == 0, -1, self.history)
        text = torch.cat((history, ids), dim=1)
        yield text
        latest, active = text[:, ids.shape[1] :], self.tracks[0].clock.active
        if active is not None:
            latest = torch.where(active[:, None] > 0, latest, self.history)
        self.history.copy_(latest)


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
        self.texts: list[TextCache] = [TextCache(self, index) for index in range(texts)]

    @property
    def active(self) -> Tensor:
        """Mask of the texts that a step continues, (B,) int32, 1 or 0."""
        active = self.tracks[0].clock.active
        if active is None:
            raise ValueError("the position counter belongs to a single text")
        return active

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[Tensor]:
        """Read one byte of each active text, (B, 1) int64: see `Cache.reading`.

        Raises:
            ValueError: `ids` has more than one byte for each text.
        """
        if ids.shape[1] != 1:
            raise ValueError(f"a batch of texts is read one byte at a time, got {ids.shape[1]}")
        with super().reading(ids) as text:
            yield text


class TextCache(Cache):
    """A view of one text in a `BatchCache`."""

    def __init__(self, batch: BatchCache, index: int) -> None:
        self.positions, self.window = batch.positions, batch.window
        self.stages = [stage.text_views[index] for stage in batch.stages]
        self.main = batch.main.text_views[index]
        self.history = None if batch.history is None else batch.history[index : index + 1]

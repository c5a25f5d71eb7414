"""States of a text that is read piece by piece: counted positions, and tensors of parts.

A part declares its own state, tensors of fixed shapes for the whole text, and nobody else looks
inside. A state belongs to a clock, which counts the positions that its list of blocks has read: the
encoder, the decoder and the network inside of a stage that makes chunks each have one of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.attention.decode_attention import count_on_
from arbcli.kernels.attention.eight_bits import (
    decode_entries,
    join_turned,
    part_turned,
    quantise_entries,
    round_entries,
)
from arbcli.model.mark import Mark, Written


class Clock:
    """Counts the positions that a list of blocks has read.

    Args:
        positions: that the text can have, at most.
        ctx: positions of a window of training.
        dtype: of activations.
        device: where states are.
        stored: float8_e4m3fn or int8, to keep keys and values in eight bits; None is `dtype`.
        texts: number of texts whose steps are computed together; None is one text, whose tensors
            have no dimension for it.
        mixed: whether numbers of keys that turn stay in `dtype` beside eight bits.
    """

    def __init__(
        self,
        positions: int,
        ctx: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
        texts: int | None = None,
        mixed: bool = False,
    ) -> None:
        self.mixed = mixed and stored is not None
        self.positions, self.ctx, self.dtype, self.device = positions, ctx, dtype, device
        self.stored, self.texts = stored, texts
        shape = () if texts is None else (texts,)
        self.position = torch.zeros(shape, dtype=torch.int32, device=device)
        """Positions read; a step reads it on the device, and nobody waits for it."""
        self.going_on = torch.zeros(shape, dtype=torch.int32, device=device)
        """Of several texts: 1 where a step reads a position, 0 where it leaves the text alone."""
        self.window = positions
        """Positions that can be read at once, at most."""
        self.length, self.start = 0, 0
        """While positions are read: their number, and if there are several, that of those before.
        """
        self._kept: dict[Any, Any] = {}
        self._here: dict[Any, Any] = {}

    def limit(self, window: int) -> None:
        """Let no more positions be read at once."""
        self.window = min(self.window, window)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Make what several states share, once."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def here(self, key: Any, make: Callable[[], Any]) -> Any:
        """Make what several states share of the positions that are being read, once."""
        if key not in self._here:
            self._here[key] = make()
        return self._here[key]

    @contextmanager
    def reading(self, length: int) -> Iterator[None]:
        """Let states read `length` positions, and count them afterwards.

        Raises:
            ValueError: more than one position, and more than `window` or the text can have.
        """
        if length > 1:
            self.start = int(self.position)
            if length > self.window or self.start + length > self.positions:
                raise ValueError(f"no room for {length} bytes at {self.start} of {self.positions}")
        with self.reading_uncounted(length):
            yield
        if self.texts is None:
            count_on_(self.position, length)
        else:
            self.position += self.going_on

    @contextmanager
    def reading_uncounted(self, length: int = 1) -> Iterator[None]:
        """Let states read `length` positions that are counted elsewhere."""
        self.length = length
        try:
            yield
        finally:
            self._here.clear()

    @property
    def places(self) -> Tensor:
        """Positions that are being read, (T,) int32."""
        return self.here(
            "places",
            lambda: self.position + torch.arange(self.length, device=self.device),
        )

    def of(self, text: int) -> "Clock":
        """Make the clock of one of several texts, which counts in the same tensor."""
        clock = Clock(self.positions, self.ctx, self.dtype, self.device)
        clock.position, clock.window = self.position[text], self.window
        return clock


class State:
    """The state of a part for a text; a subclass has the tensors."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def written(self) -> Iterator[Written]:
        """List the tensors that the text is kept in, and what a position writes to each."""
        raise NotImplementedError

    def tensors(self) -> Iterator[Tensor]:
        """List the tensors that the text is kept in."""
        return (part.tensor for part in self.written())

    def reset(self) -> None:
        """Begin a new text; what only its own positions are read from need not change."""

    def of(self, text: int, clock: Clock) -> "State":
        """Make the state of one of several texts, in the same tensors."""
        raise NotImplementedError


class Rows:
    """Vectors in slots, (n, G, d), in a dtype or in eight bits with an exponent each.

    Args:
        shape: n, G and d.
        clock: of the list of blocks, which says what they are kept in.
        turned: numbers of a vector that turn, which stay in the dtype where the clock is `mixed`.
    """

    def __init__(self, shape: tuple[int, int, int], clock: Clock, turned: int = 0) -> None:
        slots, heads, width = shape
        self.dtype, stored, device = clock.dtype, clock.stored, clock.device
        self.beside = turned if clock.mixed else 0
        """Numbers that stay beside the codes."""
        eight = stored is not None and self.beside < width
        others = (slots, heads, width - self.beside if eight else width)
        self.codes = torch.zeros(others, dtype=stored if eight else self.dtype, device=device)
        self.exponents = self.turned = None
        if eight:
            self.exponents = torch.zeros(others[:2], dtype=torch.int8, device=device)
        if eight and self.beside:
            about = {"dtype": self.dtype, "device": device}
            self.turned = torch.zeros(slots, heads, self.beside, **about)

    def __len__(self) -> int:
        """Count the slots."""
        return len(self.codes)

    def written(self, number: Callable[[Tensor], Tensor]) -> Iterator[Written]:
        """List the tensors, where a position writes a row of some number."""

        def slot(position: Tensor) -> Tensor:
            return number(position) % len(self)

        for part, dim in ((self.codes, -3), (self.exponents, -2), (self.turned, -3)):
            if part is not None:
                yield Written(part, slot, dim)

    def put(self, slots: Tensor, rows: Tensor) -> None:
        """Store (n, G, d) in slots, (n,) int64."""
        if self.turned is not None:
            turned, rows = part_turned(rows, self.beside)
            self.turned.index_copy_(0, slots, turned)
        if self.exponents is None:
            self.codes.index_copy_(0, slots, rows)
            return
        codes, exponents = quantise_entries(rows, self.codes.dtype)
        # torch copies no e4m3 by index
        self.codes.view(torch.int8).index_copy_(0, slots, codes.view(torch.int8))
        self.exponents.index_copy_(0, slots, exponents)

    def get(self, slots: Tensor) -> Tensor:
        """Read slots, (n,) int64: (n, G, d)."""
        if self.exponents is None:
            return self.codes[slots]
        codes = self.codes.view(torch.int8)[slots].view(self.codes.dtype)
        others = decode_entries(codes, self.exponents[slots], self.dtype)
        return others if self.turned is None else join_turned(self.turned[slots], others)

    def rounded(self, rows: Tensor) -> Tensor:
        """Round (..., d) as they are read back once stored."""
        if self.exponents is None:
            return rows
        return round_entries(rows, self.codes.dtype, self.beside)


class Track:
    """The states of a list of blocks, and their clock.

    Args:
        clock: theirs.
        blocks: the state of each block; None where a block keeps nothing.
    """

    def __init__(self, clock: Clock, blocks: list[State | None]) -> None:
        self.clock, self.blocks = clock, blocks

    @property
    def position(self) -> Tensor:
        """Positions read."""
        return self.clock.position

    @property
    def nbytes(self) -> int:
        """Bytes that the states take."""
        return sum(tensor.nbytes for state in self.blocks if state for tensor in state.tensors())

    def reset(self) -> None:
        """Begin a new text."""
        self.clock.position.zero_()
        for state in self.blocks:
            if state:
                state.reset()

    def mark(self, positions: int, *beside: Written) -> Mark:
        """Make a mark, from which so many positions can be taken back.

        Args:
            positions: that can be read behind it.
            beside: what they write besides the states of blocks.
        """
        written = [part for state in self.blocks if state for part in state.written()]
        return Mark(self.clock.position, [*written, *beside], positions)

    def of(self, text: int) -> "Track":
        """Make the track of one of several texts, in the same tensors."""
        clock = self.clock.of(text)
        return Track(clock, [state and state.of(text, clock) for state in self.blocks])

"""States of a text that is read piece by piece: counted positions, and tensors of parts.

A part declares its own state, tensors of fixed shapes for the whole text, and nobody else looks
inside. A state belongs to a clock, which counts the positions that its list of blocks has read: the
encoder, the decoder and the network inside of a stage that makes chunks each have one of their own.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_ahead import Kept
from arbcli.kernels.attention.decode_attention import count_on_
from arbcli.kernels.attention.eight_bits import (
    KeptIn,
    decode_entries,
    join_rotated,
    part_rotated,
    quantise_entries,
    round_entries,
)
from arbcli.model.flow import rows_of
from arbcli.model.mark import Mark, Written


class KeptTexts(NamedTuple):
    """Sizes and types of the state of a text, or of several."""

    positions: int
    """That a text can have, at most."""
    dtype: torch.dtype
    """Of activations."""
    device: torch.device
    """Where states are."""
    texts: int | None = None
    """Number of texts whose steps are computed together; None is one text, whose tensors have no
    dimension for it."""
    kept_in: KeptIn = KeptIn()
    """The form of keys and values."""
    first: int = 0
    """Position before which none is read: those before it are counted only."""


class Clock:
    """Counts the positions that a list of blocks has read.

    Args:
        ctx: positions of a window of training.
        of: what is kept.
    """

    def __init__(self, ctx: int, of: KeptTexts) -> None:
        self.ctx, self.of = ctx, of
        self.positions, self.dtype, self.device, self.texts, self.kept_in, self.first = of
        self.position = self.zeros(dtype=torch.int32)
        """Positions read; a step reads it on the device, and nobody waits for it."""
        self.going_on = None if self.texts is None else self.zeros(dtype=torch.int32)
        """(B,) int32 of several texts: 1 where a step reads a position, 0 where it leaves the text
        alone; None where every position counts."""
        self.window = self.positions
        """Positions that can be read at once, at most."""
        self.checks = False
        """Whether positions are read of which it is not said yet how many stay."""
        self.length, self.start = 0, 0
        """While positions are read: their number, and if there are several, that of those before.
        """
        self._kept: dict[Any, Any] = {}
        self._here: dict[Any, Any] = {}

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Make a tensor of a state, of `dtype` or that of activations; texts come first."""
        shape = shape if self.texts is None else (self.texts, *shape)
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

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
        self.count(length)

    def count(self, length: int = 1) -> None:
        """Count positions; of several texts one position of each that goes on."""
        if self.texts is None:
            count_on_(self.position, length)
        elif self.going_on is not None:
            self.position += self.going_on

    @contextmanager
    def reading_uncounted(self, length: int = 1) -> Iterator[None]:
        """Let states read `length` positions that are counted elsewhere."""
        self.length = length
        for text, clock in enumerate(self.each):
            clock.length = length
            clock.going_on = None if self.going_on is None else self.going_on[text]
        try:
            yield
        finally:
            for clock in (self, *self.each):
                clock._here.clear()
            for clock in self.each:
                clock.going_on = None

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Let states read positions that are counted, and kept, once it is said how many stay."""
        self.checks = True
        try:
            yield
        finally:
            self.checks = False

    @property
    def places(self) -> Tensor:
        """Positions that are being read, (T,) int32."""
        return self.here(
            "places",
            lambda: self.position + torch.arange(self.length, device=self.device),
        )

    @cached_property
    def each(self) -> list["Clock"]:
        """The clock of each of several texts, which counts in the same tensor."""
        clocks = []
        for text in range(self.texts or 0):
            clock = Clock(self.ctx, self.of._replace(texts=None))
            clock.position, clock.window = self.position[text], self.window
            clocks.append(clock)
        return clocks


class State:
    """The state of a part for a text, or for several; a subclass has the tensors."""

    by_text: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that have a dimension for several texts, in front."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def written(self) -> Iterator[Written]:
        """List the tensors that the text is kept in, and what a position writes to each."""
        raise NotImplementedError

    def tensors(self) -> Iterator[Tensor]:
        """List the tensors that the text is kept in."""
        return (part.tensor for part in self.written())

    def kept(self, positions: int) -> Iterator[Kept]:
        """List rings, and what positions leave for them that may be taken back."""
        yield from ()

    def reset(self) -> None:
        """Begin a new text; what only its own positions are read from need not change."""

    @cached_property
    def each(self) -> list[Self]:
        """The state of each of several texts, in the same tensors."""
        states = []
        for text, clock in enumerate(self.clock.each):
            own = copy.copy(self)
            own.clock = clock
            for name in self.by_text:
                part = getattr(self, name)
                setattr(own, name, None if part is None else part[text])
            states.append(own)
        return states

    def each_text(self, run: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Compute something of a position of each text by itself.

        Args:
            run: what to compute, of the state of a text and its rows.
            rows: (B, ...) tensors, of which `run` is given (1, ...).

        Returns:
            The results, one after the other; without several texts, what `run` gives.
        """
        if self.clock.texts is None:
            return run(self, *rows)
        parts = zip(self.each, *map(rows_of, rows), strict=True)
        return torch.cat([run(*own) for own in parts])


class Rows:
    """Vectors in slots, (n, G, d), in a dtype or in eight bits with an exponent each.

    Those of several texts have a dimension for them in front.

    Args:
        clock: of the list of blocks, which says what they are kept in.
        slots: n.
        heads: G.
        width: d.
        rotated: elements of a vector that RoPE rotates; they keep their dtype if `mixed`.
        heads_first: whether vectors are (G, n, d), here and where they are put and read.
        exponents: memory for these, (n, G) or (G, n) int8; None makes it.
    """

    def __init__(
        self,
        clock: Clock,
        slots: int,
        heads: int,
        width: int,
        rotated: int = 0,
        *,
        heads_first: bool = False,
        exponents: Tensor | None = None,
    ) -> None:
        self.dtype, self.unrounded = clock.dtype, rotated if clock.kept_in.mixed else 0
        stored, self.dim = clock.kept_in.stored, int(heads_first)
        """`dim` is the dimension of slots, of one text."""
        eight = stored is not None and self.unrounded < width
        shape = (heads, slots) if heads_first else (slots, heads)
        others = width - self.unrounded if eight else width
        self.codes = clock.zeros(*shape, others, dtype=stored if eight else None)
        if eight and exponents is None:
            exponents = clock.zeros(*shape, dtype=torch.int8)
        self.exponents = exponents
        self.rotated = clock.zeros(*shape, self.unrounded) if eight and self.unrounded else None
        """(n, G, rotated), what stays next to the codes."""

    def __len__(self) -> int:
        """Count the slots."""
        return self.codes.shape[self.dim - 3]

    def __getitem__(self, text: int) -> "Rows":
        """Take those of one of several texts, in the same tensors."""
        own = copy.copy(self)
        for name in ("codes", "exponents", "rotated"):
            part = getattr(self, name)
            setattr(own, name, None if part is None else part[text])
        return own

    def written(self, number: Callable[[Tensor], Tensor]) -> Iterator[Written]:
        """List the tensors, where a position writes a row of some number."""

        def slot(position: Tensor) -> Tensor:
            return number(position) % len(self)

        for part, last in ((self.codes, -3), (self.exponents, -2), (self.rotated, -3)):
            if part is not None:
                yield Written(part, slot, last + self.dim)

    def put(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Store (n, G, d) in slots, (n,) int64; return them as they are read back."""
        rotated = None
        if self.rotated is not None:
            rotated, rows = part_rotated(rows, self.unrounded)
            self.rotated.index_copy_(self.dim, slots, rotated)
        if self.exponents is None:
            self.codes.index_copy_(self.dim, slots, rows)
            return rows
        codes, exponents = quantise_entries(rows, self.codes.dtype)
        # torch copies no e4m3 by index
        self.codes.view(torch.int8).index_copy_(self.dim, slots, codes.view(torch.int8))
        self.exponents.index_copy_(self.dim, slots, exponents)
        others = decode_entries(codes, exponents, rows.dtype)
        return others if rotated is None else join_rotated(rotated, others)

    def get(self, slots: Tensor | None = None) -> Tensor:
        """Read slots, (n,) int64: (n, G, d); None is all, which may be the memory itself."""
        some: Any = ... if slots is None else (slice(None),) * self.dim + (slots,)
        if self.exponents is None:
            return self.codes[some]
        codes = self.codes.view(torch.int8)[some].view(self.codes.dtype)
        others = decode_entries(codes, self.exponents[some], self.dtype)
        return others if self.rotated is None else join_rotated(self.rotated[some], others)

    def rounded(self, rows: Tensor) -> Tensor:
        """Round (..., d) as they are read back once stored."""
        if self.exponents is None:
            return rows
        return round_entries(rows, self.codes.dtype, self.unrounded)


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

    def mark(self, positions: int, *others: Written) -> Mark:
        """Make a mark, from which so many positions can be taken back.

        Args:
            positions: that can be read after it.
            others: what they write besides the states of blocks.
        """
        written = [part for state in self.blocks if state for part in state.written()]
        return Mark(self.clock.position, [*written, *others], positions)

    @cached_property
    def each(self) -> list["Track"]:
        """The track of each of several texts, in the same tensors."""
        return [
            Track(clock, [state and state.each[text] for state in self.blocks])
            for text, clock in enumerate(self.clock.each)
        ]

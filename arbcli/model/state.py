"""Decoding states: position counters, and the tensors that parts keep for a text.

Each part declares a state of fixed-shape tensors that only it accesses. A state belongs to a
counter of the positions that a stack of blocks has read. The encoder, the decoder and the inner
network of a stage have one each.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from arbcli.kernels.attention import eight_bits
from arbcli.kernels.attention.decode_attention import SpeculativeRings, count_on_
from arbcli.model.parts.base import split_texts
from arbcli.model.parts.cached import CacheFormat


class StateSpec(NamedTuple):
    """Sizes and dtypes of decoding states."""

    positions: int
    """Maximum length of a text in positions."""
    dtype: torch.dtype
    """Dtype of activations."""
    device: torch.device
    """Device of the states."""
    texts: int | None = None
    """Batch size; None is a single text, whose tensors have no batch dimension."""
    cache_format: CacheFormat = CacheFormat()
    """Storage format of keys and values."""
    first: int = 0
    """First position that is read; earlier ones are only counted."""


class PositionCounter:
    """Counts the positions that a stack of blocks has read.

    Args:
        ctx: length of a training window in positions.
        spec: sizes and dtypes of the states.
    """

    def __init__(self, ctx: int, spec: StateSpec) -> None:
        self.ctx, self.spec = ctx, spec
        self.positions, self.dtype, self.device, self.texts, self.cache_format, self.first = spec
        self.position = self.zeros(dtype=torch.int32)
        """Number of positions read, an int32 scalar tensor; (B,) for a batch of texts."""
        self.active = None if self.texts is None else self.zeros(dtype=torch.int32)
        """Mask of the texts of a batch that a step continues, (B,) int32, 1 or 0; None for all."""
        self.window = self.positions
        """Maximum number of positions that can be read at once."""
        self.is_speculative = False
        """Whether the positions being read are speculative, so that some may be rejected."""
        self.length, self.start = 0, 0
        """Number of positions being read, and the index of the first one if there are several."""
        self._semaphores: dict[int, Tensor] = {}
        self._shared: dict[Any, Any] = {}

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Create a tensor of a state, with a leading batch dimension for a batch of texts.

        Args:
            shape: shape for one text.
            dtype: dtype; None is that of activations.
        """
        shape = shape if self.texts is None else (self.texts, *shape)
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def limit(self, window: int) -> None:
        """Lower the maximum number of positions that can be read at once to `window`."""
        self.window = min(self.window, window)

    def semaphores(self, heads: int) -> Tensor:
        """Return the semaphores of kernels, (heads,) int32, which states share.

        They are zeros between launches.
        """
        if heads not in self._semaphores:
            self._semaphores[heads] = self.zeros(heads, dtype=torch.int32)
        return self._semaphores[heads]

    def shared(self, key: Any, create: Callable[[], Any]) -> Any:
        """Return the object of a key that states share while positions are read.

        `create` makes it on first use; it is discarded after these positions.
        """
        if key not in self._shared:
            self._shared[key] = create()
        return self._shared[key]

    @contextmanager
    def reading(self, length: int) -> Iterator[None]:
        """Read `length` positions in the block, and count them afterwards.

        Raises:
            ValueError: `length` exceeds `window`, or the length of the text.
        """
        if length > 1:
            self.start = int(self.position)
            if length > self.window or self.start + length > self.positions:
                raise ValueError(f"no room for {length} bytes at {self.start} of {self.positions}")
        with self.reading_uncounted(length):
            yield
        self.count(length)

    def count(self, length: int = 1) -> None:
        """Advance by `length` positions, or in a batch by one position of each active text."""
        if self.texts is None:
            count_on_(self.position, length)
        elif self.active is not None:
            self.position += self.active

    @contextmanager
    def reading_uncounted(self, length: int = 1) -> Iterator[None]:
        """Read `length` positions in the block, which the caller counts."""
        self.length = length
        for text, clock in enumerate(self.text_views):
            clock.length = length
            clock.active = None if self.active is None else self.active[text]
        try:
            yield
        finally:
            for clock in (self, *self.text_views):
                clock._shared.clear()
            for clock in self.text_views:
                clock.active = None

    @contextmanager
    def reading_speculatively(self) -> Iterator[None]:
        """Read speculative positions in the block, which are stored and counted once accepted."""
        self.is_speculative = True
        try:
            yield
        finally:
            self.is_speculative = False

    @property
    def position_ids(self) -> Tensor:
        """Indices of the positions being read, (T,) int32."""
        return self.shared(
            "position_ids", lambda: self.position + torch.arange(self.length, device=self.device)
        )

    @cached_property
    def text_views(self) -> list["PositionCounter"]:
        """The position counter of each text of a batch, with views of the same positions."""
        clocks = []
        for text in range(self.texts or 0):
            clock = PositionCounter(self.ctx, self.spec._replace(texts=None))
            clock.position, clock.window = self.position[text], self.window
            clocks.append(clock)
        return clocks


class State:
    """The decoding state of a part for a text, or for a batch; subclasses add the tensors."""

    stored: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes with tensors of the state: `Tensor`, `Rows`, or None if unused."""
    views: ClassVar[tuple[str, ...]] = ()
    """Names of other attributes with a leading batch dimension, whose memory is shared."""

    def __init__(self, clock: PositionCounter) -> None:
        self.clock = clock

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the state."""
        for part in (getattr(self, name) for name in self.stored):
            if part is not None:
                yield from part.tensors() if isinstance(part, Rows) else (part,)

    def speculative_rings(self, positions: int) -> Iterator[SpeculativeRings]:
        """Yield the rings with the keys and values of speculative positions to store in them."""
        yield from ()

    def reset(self) -> None:
        """Reset for a new text; slots that are written before they are read stay as they are."""

    @cached_property
    def text_views(self) -> list[Self]:
        """The state of each text of a batch, as views."""
        states = []
        for text, clock in enumerate(self.clock.text_views):
            view = copy.copy(self)
            view.clock = clock
            for name in (*self.stored, *self.views):
                part = getattr(self, name)
                setattr(view, name, None if part is None else part[text])
            states.append(view)
        return states

    def map_texts(self, run: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Apply a function to each text of a batch separately.

        Args:
            run: function of the state of one text and its rows.
            rows: (B, ...) tensors, passed to `run` as (1, ...).

        Returns:
            The concatenated results; for a single text, the result of `run`.
        """
        if self.clock.texts is None:
            return run(self, *rows)
        parts = zip(self.text_views, *map(split_texts, rows), strict=True)
        return torch.cat([run(*inputs) for inputs in parts])


class Rows:
    """Storage of vectors in slots, (n, G, d): in a dtype, or as eight-bit codes with exponents.

    Each vector of codes has an exponent. A batch of texts has a leading batch dimension.

    Args:
        clock: position counter of the stack of blocks, which has the storage format.
        slots: n.
        heads: G.
        width: d.
        rotated: number of elements that RoPE rotates; they keep their dtype in a mixed format.
        heads_first: whether the layout is (G, n, d), in storage and in arguments.
        exponents: memory for the exponents, (n, G) or (G, n) int8; None allocates it.
    """

    def __init__(
        self,
        clock: PositionCounter,
        slots: int,
        heads: int,
        width: int,
        rotated: int = 0,
        *,
        heads_first: bool = False,
        exponents: Tensor | None = None,
    ) -> None:
        self.dtype, self.unrounded = clock.dtype, rotated if clock.cache_format.mixed else 0
        code_dtype, self.dim = clock.cache_format.code_dtype, int(heads_first)
        """`dim` is the dimension of slots, without the batch."""
        quantises = code_dtype is not None and self.unrounded < width
        shape = (heads, slots) if heads_first else (slots, heads)
        code_width = width - self.unrounded if quantises else width
        self.codes = clock.zeros(*shape, code_width, dtype=code_dtype if quantises else None)
        if quantises and exponents is None:
            exponents = clock.zeros(*shape, dtype=torch.int8)
        self.exponents = exponents
        self.rotated = clock.zeros(*shape, self.unrounded) if quantises and self.unrounded else None
        """(n, G, rotated), elements that are not quantised."""

    def __len__(self) -> int:
        """Return the number of slots."""
        return self.codes.shape[self.dim - 3]

    def __getitem__(self, text: int) -> "Rows":
        """Select one text of a batch, as views."""
        view = copy.copy(self)
        for name in ("codes", "exponents", "rotated"):
            part = getattr(self, name)
            setattr(view, name, None if part is None else part[text])
        return view

    def tensors(self) -> Iterator[Tensor]:
        """Yield the allocated tensors."""
        tensors = self.codes, self.exponents, self.rotated
        yield from (tensor for tensor in tensors if tensor is not None)

    def put(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Store vectors (n, G, d) in slots, (n,) int64; return them as `get` would."""
        rotated = None
        if self.rotated is not None:
            rotated, rows = eight_bits.split_rotated(rows, self.unrounded)
            self.rotated.index_copy_(self.dim, slots, rotated)
        if self.exponents is None:
            self.codes.index_copy_(self.dim, slots, rows)
            return rows
        codes, exponents = eight_bits.quantise_entries(rows, self.codes.dtype)
        # torch does not support index_copy_ for e4m3
        self.codes.view(torch.int8).index_copy_(self.dim, slots, codes.view(torch.int8))
        self.exponents.index_copy_(self.dim, slots, exponents)
        decoded = eight_bits.decode_entries(codes, exponents, rows.dtype)
        return decoded if rotated is None else eight_bits.join_rotated(rotated, decoded)

    def get(self, slots: Tensor | None = None) -> Tensor:
        """Read slots, (n,) int64, as (n, G, d); None reads all, without a copy if possible."""
        index: Any = ... if slots is None else (slice(None),) * self.dim + (slots,)
        if self.exponents is None:
            return self.codes[index]
        codes = self.codes.view(torch.int8)[index].view(self.codes.dtype)
        decoded = eight_bits.decode_entries(codes, self.exponents[index], self.dtype)
        if self.rotated is None:
            return decoded
        return eight_bits.join_rotated(self.rotated[index], decoded)

    def round(self, rows: Tensor) -> Tensor:
        """Round vectors (..., d) to the values that storing them would give."""
        if self.exponents is None:
            return rows
        return eight_bits.round_entries(rows, self.codes.dtype, self.unrounded)


class Track:
    """The decoding states of a stack of blocks, and their position counter.

    Args:
        clock: counter of the stack's positions.
        blocks: state of each block; None for a block without one.
    """

    def __init__(self, clock: PositionCounter, blocks: list[State | None]) -> None:
        self.clock, self.blocks = clock, blocks

    @property
    def position(self) -> Tensor:
        """Number of positions read, an int32 scalar tensor; (B,) for a batch of texts."""
        return self.clock.position

    @property
    def nbytes(self) -> int:
        """Memory of the states in bytes."""
        return sum(tensor.nbytes for state in self.blocks if state for tensor in state.tensors())

    def reset(self) -> None:
        """Reset the states for a new text."""
        self.clock.position.zero_()
        for state in self.blocks:
            if state:
                state.reset()

    @cached_property
    def text_views(self) -> list["Track"]:
        """States of each text of a batch, as views."""
        return [
            Track(clock, [state and state.text_views[text] for state in self.blocks])
            for text, clock in enumerate(self.clock.text_views)
        ]

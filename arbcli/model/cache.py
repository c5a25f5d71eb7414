"""What attention has seen: the keys and values of the last bytes of one text.

A model is trained on windows of `ctx` bytes, so a byte attends to itself and the `ctx` - 1 before
it, in every block. That is what a forward over the whole text would give with a banded causal mask:
byte i sees the bytes i - ctx + 1 to i.

Keys and values may be kept in eight bits, as entries of `eight_bits`. Then a byte attends to what
was stored, its own key and value too, whether it is read by itself or with others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.dense import ModelConfig
from arbcli.kernels.attention.attend_parts import AttentionParts, attend_parts, fits_parts
from arbcli.kernels.attention.decode_attention import decode_attention
from arbcli.kernels.attention.decode_attention_8bit import decode_attention_8bit
from arbcli.kernels.attention.decode_attention_rows import decode_attention_rows
from arbcli.kernels.attention.eight_bits import decode_entries, quantise_entries, round_entries
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.rotary import rotary_table, table_rows


class CachedAttention(nn.Module):
    """Attention whose keys and values a cache keeps."""

    stored: torch.dtype | None = None
    """What a forward without a cache rounds them to, as if they came from one in eight bits."""

    def as_stored(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Round tensors of entries, (..., d), to what is read back of them."""
        if self.stored is None:
            return parts
        return tuple(round_entries(part, self.stored) for part in parts)


class KeyValueCache:
    """Rings of keys and values, one of each for every block, allocated once.

    The byte at position p is in slot p mod W and stays until the byte p + W comes; W is `ctx`, or
    less for a text that is shorter. Keys were turned by angles that only ever grow with p, and only
    differences of angles matter, so nothing is moved when the ring comes round.

    Args:
        config: of the model.
        positions: bytes that the text can have.
        dtype: of keys and values.
        device: where they are.
        window: positions that each one attends to; None is `ctx` of them.
        stored: float8_e4m3fn or int8, to keep them in eight bits; None is `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        self.positions, self.window = positions, min(window or config.ctx, config.ctx, positions)
        self.short = window is not None
        """Whether rings have what a window has, however long the context."""
        self.position = torch.zeros((), dtype=torch.int32, device=device)
        """Bytes seen; a step reads it on the device, and nobody waits for it."""
        self.tickets = torch.zeros(config.heads, dtype=torch.int32, device=device)
        self.table = rotary_table(table_rows(positions, config.ctx), config.head_dim, device)
        ring = (2, config.heads, self.window, config.head_dim)
        self.blocks = [
            BlockCache(
                self,
                *torch.zeros(ring, dtype=stored or dtype, device=device),
                torch.zeros(ring[:-1], dtype=torch.int8, device=device) if stored else None,
            )
            for _ in range(config.layers)
        ]
        self.chunk: _Chunk | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the rings take."""
        return sum(block.nbytes for block in self.blocks)

    def reset(self) -> None:
        """Begin a new text."""
        self.position.zero_()

    @contextmanager
    def reading(self, length: int) -> Iterator[None]:
        """Let the blocks read `length` bytes more, and count them afterwards.

        Raises:
            ValueError: more than one byte, and more than the window or the text can have.
        """
        if length > 1:
            self.chunk = self._chunk(length)
        yield
        self.chunk = None
        self.position += length

    def _chunk(self, length: int) -> "_Chunk":
        start, window, device = int(self.position), self.window, self.position.device
        if length > window or start + length > self.positions:
            raise ValueError(f"no room for {length} bytes at {start} of {self.positions}")
        slots = torch.arange(start, start + length, device=device) % window
        angles = tuple(part[start : start + length] for part in self.table)
        if start == 0:
            return _Chunk(angles, slots)
        seen = min(start, window)
        before = torch.arange(start - seen, start, device=device) % window
        every = torch.ones(length, seen + length, dtype=torch.bool, device=device)
        return _Chunk(angles, slots, before, every.tril(seen).triu(seen - window + 1))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several bytes that are read at once."""

    angles: tuple[Tensor, Tensor]
    """Their rows of the rotary table."""
    slots: Tensor
    """Where they go."""
    before: Tensor | None = None
    """Slots of the bytes before them, in the order of the text; None if they are the first."""
    mask: Tensor | None = None
    """(T, seen + T) bool: which of those before, and of themselves, each of them attends to."""


class BlockCache:
    """The rings of one block: `keys` and `values`, (heads, W, d) each.

    In eight bits these are codes, and `exponents`, (2, heads, W) int8, are those of both.
    """

    def __init__(
        self, whole: KeyValueCache, keys: Tensor, values: Tensor, exponents: Tensor | None = None
    ) -> None:
        self.whole, self.keys, self.values, self.exponents = whole, keys, values, exponents

    @property
    def nbytes(self) -> int:
        """Bytes that the rings take."""
        return sum(t.nbytes for t in (self.keys, self.values, self.exponents) if t is not None)

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Rows of the rotary table for the bytes that are being read: cos and sin, (T, d / 2)."""
        return self.whole.chunk.angles

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to the bytes before and to the new ones, then store these.

        All are (1, heads, T, d), turned and normalised.
        """
        if self.exponents is None:
            y = self._attend(q, k, v, self.keys, self.values)
            self._store(self.keys, k[0])
            self._store(self.values, v[0])
            return y
        rings = (self.keys, self.values)
        entries = [quantise_entries(new[0], self.keys.dtype) for new in (k, v)]
        k, v = (decode_entries(*entry, q.dtype)[None] for entry in entries)
        y = self._attend(q, k, v, *rings)
        for ring, of_ring, (codes, exponents) in zip(rings, self.exponents, entries, strict=True):
            self._store(ring.view(torch.int8), codes.view(torch.int8))  # torch copies no e4m3 so
            self._store(of_ring, exponents)
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *rings: Tensor) -> Tensor:
        chunk = self.whole.chunk
        if chunk.before is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        keys, values = (
            torch.cat([self._before(index, ring, q.dtype), new[0]], dim=1)[None]
            for index, (ring, new) in enumerate(zip(rings, (k, v), strict=True))
        )
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=chunk.mask)

    def _before(self, index: int, ring: Tensor, dtype: torch.dtype) -> Tensor:
        """Read what is before the new bytes in one of the rings."""
        before = self.whole.chunk.before
        if self.exponents is None:
            return ring[:, before]
        codes = ring.view(torch.int8)[:, before].view(ring.dtype)
        return decode_entries(codes, self.exponents[index][:, before], dtype)

    def _store(self, ring: Tensor, new: Tensor) -> None:
        ring.index_copy_(1, self.whole.chunk.slots, new)

    def attend_one(self, qkv: Tensor) -> Tensor:
        """Store one new byte, and attend to the last W; no shape depends on its position.

        Args:
            qkv: (1, 1, 3, heads, d) as the projection gave it.

        Returns:
            (1, heads, 1, d).
        """
        whole = self.whole
        about = (whole.position, *whole.table, whole.tickets, NORM_EPS)
        if self.exponents is None:
            y = decode_attention(qkv[0, 0], self.keys, self.values, *about, whole.short)
        else:
            rings = (self.keys, self.values, self.exponents)
            y = decode_attention_8bit(qkv[0, 0], *rings, *about)
        return y[None, :, None]

    def leaves_parts(self, qkv: Tensor) -> bool:
        """Whether `attend_in_parts` is for this; a short ring has a program for all of a head."""
        return self.exponents is None and not self.whole.short and fits_parts(qkv)

    def attend_in_parts(self, qkv: Tensor) -> AttentionParts:
        """Do as `attend_one`, but leave the parts to whoever reads them."""
        whole = self.whole
        about = (whole.position, *whole.table, NORM_EPS)
        return attend_parts(qkv[0, 0], self.keys, self.values, *about)


class SeveralCache:
    """What attention has seen of several texts, whose steps are computed together.

    Args:
        config: of the model.
        texts: B, how many.
        positions: bytes that the longest text can have.
        dtype: of keys and values.
        device: where they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        texts: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.positions, self.window = positions, min(config.ctx, positions)
        self.position = torch.zeros(texts, dtype=torch.int32, device=device)
        """Bytes seen of each text."""
        self.going_on = torch.zeros(texts, dtype=torch.int32, device=device)
        """1 where a step reads one byte more; 0 where it leaves a text at its last byte."""
        self.tickets = torch.zeros(texts, config.heads, dtype=torch.int32, device=device)
        self.table = rotary_table(table_rows(positions, config.ctx), config.head_dim, device)
        ring = (2, texts, config.heads, self.window, config.head_dim)
        self.blocks = [
            SeveralBlock(self, *torch.zeros(ring, dtype=dtype, device=device))
            for _ in range(config.layers)
        ]
        self.texts = [OneOfSeveral(self, index) for index in range(texts)]
        """The cache of each text, to read its prompt by itself."""

    @property
    def nbytes(self) -> int:
        """Bytes that the rings take."""
        return sum(block.keys.nbytes + block.values.nbytes for block in self.blocks)

    def reset(self) -> None:
        """Begin new texts."""
        self.position.zero_()

    @contextmanager
    def reading(self, length: int) -> Iterator[None]:
        """Let the blocks read one byte more of each text that goes on, and count it afterwards.

        Raises:
            ValueError: more than one byte.
        """
        if length != 1:
            raise ValueError(f"several texts are read one byte at a time, got {length}")
        yield
        self.position += self.going_on


class SeveralBlock:
    """The rings of one block for all texts: `keys` and `values`, (B, heads, W, d) each."""

    def __init__(self, whole: SeveralCache, keys: Tensor, values: Tensor) -> None:
        self.whole, self.keys, self.values = whole, keys, values

    def leaves_parts(self, qkv: Tensor) -> bool:
        """Never: a kernel for several texts averages them itself."""
        return False

    def attend_one(self, qkv: Tensor) -> Tensor:
        """Store one new byte of each text, and attend to its last W.

        Args:
            qkv: (B, 1, 3, heads, d) as the projection gave it.

        Returns:
            (B, heads, 1, d).
        """
        whole = self.whole
        about = (whole.position, *whole.table, whole.tickets, NORM_EPS)
        return decode_attention_rows(qkv[:, 0], self.keys, self.values, *about)[:, :, None]


class OneOfSeveral(KeyValueCache):
    """The part of a `SeveralCache` that is of one text, as a cache by itself."""

    def __init__(self, whole: SeveralCache, index: int) -> None:
        self.positions, self.window, self.short = whole.positions, whole.window, False
        self.position, self.tickets = whole.position[index], whole.tickets[index]
        self.table, self.chunk = whole.table, None
        self.blocks = [
            BlockCache(self, block.keys[index], block.values[index]) for block in whole.blocks
        ]

"""What attention has seen: the keys and values of the last bytes of one text.

A model is trained on windows of `ctx` bytes, so a byte attends to itself and the `ctx` - 1 before
it, in every block. That is what a forward over the whole text would give with a banded causal mask:
byte i sees the bytes i - ctx + 1 to i.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.config.dense import ModelConfig
from arbcli.kernels.attention.decode_attention import decode_attention
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.rotary import rotary_table, table_rows


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
    """

    def __init__(
        self,
        config: ModelConfig,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int | None = None,
    ) -> None:
        self.positions, self.window = positions, min(window or config.ctx, config.ctx, positions)
        self.position = torch.zeros((), dtype=torch.int32, device=device)
        """Bytes seen; a step reads it on the device, and nobody waits for it."""
        self.tickets = torch.zeros(config.heads, dtype=torch.int32, device=device)
        self.table = rotary_table(table_rows(positions, config.ctx), config.head_dim, device)
        ring = (2, config.heads, self.window, config.head_dim)
        self.blocks = [
            BlockCache(self, *torch.zeros(ring, dtype=dtype, device=device))
            for _ in range(config.layers)
        ]
        self.chunk: _Chunk | None = None

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
    """The rings of one block: `keys` and `values`, (heads, W, d) each."""

    def __init__(self, whole: KeyValueCache, keys: Tensor, values: Tensor) -> None:
        self.whole, self.keys, self.values = whole, keys, values

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Rows of the rotary table for the bytes that are being read: cos and sin, (T, d / 2)."""
        return self.whole.chunk.angles

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to the bytes before and to the new ones, then store these.

        All are (1, heads, T, d), turned and normalised.
        """
        chunk = self.whole.chunk
        if chunk.before is None:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            keys, values = (
                torch.cat([ring[:, chunk.before], new[0]], dim=1)[None]
                for ring, new in ((self.keys, k), (self.values, v))
            )
            y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=chunk.mask)
        self.keys.index_copy_(1, chunk.slots, k[0])
        self.values.index_copy_(1, chunk.slots, v[0])
        return y

    def attend_one(self, qkv: Tensor) -> Tensor:
        """Store one new byte, and attend to the last W; no shape depends on its position.

        Args:
            qkv: (1, 1, 3, heads, d) as the projection gave it.

        Returns:
            (1, heads, 1, d).
        """
        whole = self.whole
        y = decode_attention(
            qkv[0, 0], self.keys, self.values, whole.position, *whole.table, whole.tickets, NORM_EPS
        )
        return y[None, :, None]

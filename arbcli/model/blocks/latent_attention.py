"""Attention over compressed keys and values, their rotary part apart.

A position keeps one vector for all heads: `latent` numbers from which keys and values are made
again, and `rotary` ones that are a part of every head's key and turned by the position.

One new byte attends to these vectors as they are. A query times W n, a head's key, is (W.T query)
times n, and a mean of W' n, the values, is W' times the mean of n; so two products of one row take
the place of making all keys and values again. Only the lengths of the keys, which are normalised,
are kept beside them.
Source: DeepSeek-AI, "DeepSeek-V2", https://arxiv.org/abs/2405.04434, section 2.1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.config.graph import GraphConfig
from arbcli.kernels.attention.decode_latent import decode_latent
from arbcli.kernels.attention.eight_bits import decode_entries, quantise_entries
from arbcli.model.cache import CachedAttention
from arbcli.model.initial import output_std
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import NORM_EPS, TernaryRMSNorm
from arbcli.model.layers.rotary import rotary_table, rotate, table_rows

SHARPNESS = 2.0
"""What scores are multiplied by: only a part of a normalised key tells its position, and with 1 no
position can stand out enough."""
ALIGNMENT = 16
"""Bytes: kernels of attention on a GPU read so many at once."""


class LatentAttention(CachedAttention):
    """Causal self-attention; queries and keys are normalised after their rotary part is turned."""

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.latent, self.rotary = config.latent, config.rotary
        self.still = config.head_dim - config.rotary
        compressed = config.latent + config.rotary
        about = {"area": "attention"}
        self.query_down = TernaryLinear(config.dim + compressed, config.dim, config, **about)
        self.latent_norm = TernaryRMSNorm(config.latent, config)
        up = config.heads * (self.still + self.head_dim)
        self.up = TernaryLinear(up, config.latent, config, **about)
        self.sub_norm = TernaryRMSNorm(config.dim, config)
        about["std"] = output_std(config.dim, config.layers)
        self.output = TernaryLinear(config.dim, config.dim, config, **about)

    def forward(
        self, x: Tensor, norm: TernaryRMSNorm, past: "LatentBlockCache | None" = None
    ) -> Tensor:
        """Normalise (B, T, D) and mix every position with those before it, and with the past."""
        batch, length, dim = x.shape
        q, c = self.query_down(x, norm).split((dim, self.latent + self.rotary), dim=-1)
        table = past.angles if past else rotary_table(length, self.rotary, x.device)
        angles = [part[:, None] for part in table]  # for (T, heads, rotary)
        q = q.view(batch, length, self.heads, self.head_dim)
        turned = rotate(q[..., self.still :], *angles).to(x.dtype)
        q = torch.cat((q[..., : self.still], turned), dim=-1)
        turned = rotate(c[..., None, self.latent :], *angles).to(x.dtype)  # (B, T, 1, rotary)
        latent, mask = c[..., : self.latent], None
        if past is None:
            (latent,) = self.as_stored(latent)
        else:
            latent, turned, mask = past.extend(latent, turned)
            if length == 1:
                y = self._attend_one(q, latent, turned, past)
                return self.output(y.view(batch, length, dim), self.sub_norm)
        k, v = self._keys_and_values(latent, turned)
        if past is not None:
            past.extend_lengths(k[:, -length:])
        q, k = (functional.rms_norm(part, (self.head_dim,), eps=NORM_EPS) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=SHARPNESS * self.head_dim**-0.5
        )  # (B, H, T, head_dim)
        return self.output(y.transpose(1, 2).reshape(batch, length, dim), self.sub_norm)

    def one_position(self, x: Tensor, past: "LatentBlockCache") -> Tensor:
        """Normalise one position of the stream, mix it with the past, and add that to it.

        It is for a past that is not in eight bits, and norms of ones.
        """
        row = self.query_down.fused(x, normalise=True)
        up = self.up.decoded(x.dtype)
        y = past.attend_one(row.flatten(), up, SHARPNESS * self.head_dim**-0.5)
        return self.output.fused(y.view(x.shape), normalise=True, added=x)

    def _keys_and_values(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Make them of compressed positions: (B, T, heads, head_dim) each, not yet normalised."""
        kv = self.up(latent, self.latent_norm)
        kv = kv.view(len(kv), -1, self.heads, self.still + self.head_dim)
        k = torch.cat((kv[..., : self.still], turned.expand(-1, -1, self.heads, -1)), dim=-1)
        v = kv[..., self.still :]
        if self.still * v.itemsize % ALIGNMENT:
            v = v.contiguous()
        return k, v

    def _attend_one(
        self, q: Tensor, latent: Tensor, turned: Tensor, past: "LatentBlockCache"
    ) -> Tensor:
        """Attend with one query, (1, 1, heads, head_dim), to the ring with the new position behind.

        Returns:
            (heads, head_dim), computed in float32.
        """
        k, _ = self._keys_and_values(latent[:, -1:], turned[:, -1:])
        up = self.up.weight.weight(torch.float32).view(self.heads, -1, self.latent)
        to_keys, to_values = up.split((self.still, self.head_dim), dim=1)  # (heads, ..., latent)
        q = functional.rms_norm(q[0, 0], (self.head_dim,), eps=NORM_EPS).float()
        still, query = q.split((self.still, self.rotary), dim=-1)
        n = self.latent_norm(latent[0]).float()  # (W + 1, latent)
        in_latent = (still[:, None] @ to_keys)[:, 0]  # (heads, latent)
        scores = in_latent @ n.T + query @ turned[0, :, 0].float().T  # (heads, W + 1)
        scores *= past.extend_lengths(k).T * (SHARPNESS * self.head_dim**-0.5)
        share = torch.softmax(scores.masked_fill(~past.whole.chunk.mask, -torch.inf), dim=-1)
        y = to_values @ (share @ n)[..., None]  # (heads, head_dim, 1)
        return y[..., 0].to(latent.dtype)


class LatentCache:
    """Rings of compressed positions, one for every block, and the last bytes of the text.

    The byte at position p is in slot p mod W and stays until the byte p + W comes.

    Args:
        config: of the model.
        positions: bytes that the text can have.
        history: bytes before a chunk that the text sequencer needs.
        dtype: of what is kept.
        device: where it is.
        stored: float8_e4m3fn or int8, to keep compressed positions in eight bits; what is turned by
            positions stays in `dtype`. None is `dtype` for both.
    """

    def __init__(
        self,
        config: GraphConfig,
        positions: int,
        history: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stored: torch.dtype | None = None,
    ) -> None:
        self.positions, self.window = positions, min(config.ctx, positions)
        self.position = torch.zeros((), dtype=torch.int32, device=device)
        """Bytes seen; a step reads it on the device, and nobody waits for it."""
        self.table = rotary_table(table_rows(positions, config.ctx), config.rotary, device)
        self.chunk: _Chunk | None = None
        self.history = torch.full((1, history), -1, dtype=torch.int64, device=device)
        like = {"dtype": dtype, "device": device}
        self.blocks = [
            LatentBlockCache(
                self,
                torch.zeros(1, self.window, config.latent, dtype=stored or dtype, device=device),
                torch.zeros(1, self.window, 1, config.rotary, **like),
                torch.zeros(self.window, config.heads, device=device),
                torch.zeros(1, self.window, dtype=torch.int8, device=device) if stored else None,
            )
            for _ in range(config.layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that the rings take."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def in_eight_bits(self) -> bool:
        """Whether compressed positions are kept so."""
        return any(block.exponents is not None for block in self.blocks)

    def reset(self) -> None:
        """Begin a new text."""
        self.position.zero_()

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[Tensor]:
        """Let the blocks read some bytes more, (1, T) int64, and count them afterwards.

        Yields:
            (1, history + T) int64: the bytes with those before them, negative where there are none.

        Raises:
            ValueError: more than one byte, and more than the window or the text can have.
        """
        length = ids.shape[1]
        if length > 1 and (length > self.window or int(self.position) + length > self.positions):
            start = int(self.position)
            raise ValueError(f"no room for {length} bytes at {start} of {self.positions}")
        # the first byte of a text forgets those of a text before it, as captured steps start anew
        before = torch.where(self.position == 0, -1, self.history)
        self.chunk = _Chunk(self, length)
        text = torch.cat((before, ids), dim=1)
        yield text
        self.history.copy_(text[:, length:])
        self.position += length


class _Chunk:
    """Bytes that are being read; what is made of their positions is made when it is needed."""

    def __init__(self, whole: LatentCache, length: int) -> None:
        self.whole, self.length = whole, length

    @cached_property
    def places(self) -> Tensor:
        """Their positions, (T,)."""
        position = self.whole.position
        return position + torch.arange(self.length, device=position.device)

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Their rows of the rotary table: cos and sin, (T, d / 2)."""
        cos, sin = (part[self.places] for part in self.whole.table)
        return cos, sin

    @cached_property
    def mask(self) -> Tensor:
        """What each of them attends to: the ring as it was, then themselves, (T, W + T) bool."""
        position, window = self.whole.position, self.whole.window
        slots = torch.arange(window, device=position.device)
        place = position - 1 - (position - 1 - slots) % window  # place in each slot
        seen = (place >= 0) & (place > self.places[:, None] - window)
        return torch.cat((seen, seen.new_ones(self.length, self.length).tril()), dim=1)


class LatentBlockCache:
    """The ring of one block: compressed positions, and the turned part of their keys.

    In eight bits the first are codes, and `exponents`, (1, W) int8, are theirs. `lengths`,
    (W, heads) float32, has what normalises each key.
    """

    def __init__(
        self,
        whole: LatentCache,
        latent: Tensor,
        turned: Tensor,
        lengths: Tensor,
        exponents: Tensor | None = None,
    ) -> None:
        self.whole, self.latent, self.turned = whole, latent, turned
        self.lengths, self.exponents = lengths, exponents

    @property
    def nbytes(self) -> int:
        """Bytes that the ring takes."""
        parts = (self.latent, self.turned, self.lengths, self.exponents)
        return sum(part.nbytes for part in parts if part is not None)

    def extend_lengths(self, k: Tensor) -> Tensor:
        """Put what normalises the keys in the ring before that of new ones, and store these.

        Args:
            k: (1, T, heads, head_dim), not yet normalised.

        Returns:
            (W + T, heads) float32.
        """
        lengths = torch.rsqrt(k[0].float().square().mean(dim=-1) + NORM_EPS)
        found = torch.cat((self.lengths, lengths))
        self.lengths.index_copy_(0, self.whole.chunk.places % self.whole.window, lengths)
        return found

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Rows of the rotary table for the bytes that are being read."""
        return self.whole.chunk.angles

    def attend_one(self, row: Tensor, up: Tensor, scale: float) -> Tensor:
        """Store one new position, and attend to the last W: see `decode_latent`."""
        whole = self.whole
        rings = self.latent[0], self.turned[0, :, 0], self.lengths
        return decode_latent(row, up, *rings, whole.position, *whole.table, scale, NORM_EPS)

    def extend(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put the ring before the new positions, and store these.

        Returns:
            Compressed positions and turned parts, (1, W + T, ...) each, and the (T, W + T) bool
            mask of which each new position attends to.
        """
        whole = self.whole
        slots, before = whole.chunk.places % whole.window, self.latent
        if self.exponents is None:
            after = torch.cat((before, latent), dim=1)
            self.latent.index_copy_(1, slots, latent)
        else:
            codes, exponents = quantise_entries(latent, before.dtype)
            before = decode_entries(before, self.exponents, latent.dtype)
            after = torch.cat((before, decode_entries(codes, exponents, latent.dtype)), dim=1)
            # torch copies no e4m3 by index
            self.latent.view(torch.int8).index_copy_(1, slots, codes.view(torch.int8))
            self.exponents.index_copy_(1, slots, exponents)
        found = after, torch.cat((self.turned, turned), dim=1)
        self.turned.index_copy_(1, slots, turned)
        return *found, whole.chunk.mask

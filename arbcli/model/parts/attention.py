"""Attention with fused projections, rotary positions, and normalised queries and keys.

A model is trained on windows of `ctx` positions, so a position attends to itself and the `ctx` - 1
before it, in every block. That is what a forward over the whole text would give with a banded
causal mask: position i sees the positions i - ctx + 1 to i.

Keys and values may be kept in eight bits, as entries of `eight_bits`. Then a position attends to
what was stored, its own key and value too, whether it is read by itself or with others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.site import Site
from arbcli.kernels.attention.attend_parts import AttentionParts, attend_parts, fits_parts
from arbcli.kernels.attention.decode_attention import decode_attention
from arbcli.kernels.attention.decode_attention_8bit import decode_attention_8bit
from arbcli.kernels.attention.decode_attention_rows import decode_attention_rows
from arbcli.kernels.attention.eight_bits import decode_entries, quantise_entries
from arbcli.model.flow import Flow, Reading, project
from arbcli.model.initial import output_std
from arbcli.model.layers.attend import attend_causally
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.rotary import rotary_table, table_rows
from arbcli.model.parts.base import CachedAttention
from arbcli.model.parts.window import attend_in_window
from arbcli.model.state import Clock, State


class Attention(CachedAttention):
    """Causal self-attention over rotary positions, with normalised queries and keys."""

    name = "attention"
    compiles = True
    steps_fused = True
    steps_along = True

    def __init__(self, config: AttentionConfig, site: Site) -> None:
        super().__init__()
        parts, dim, self.window = layers_for(site), site.dim, config.window
        self.steps_several = config.window is None
        self.heads, self.width = config.heads, config.head_width(site)
        self.rotary_norm = parts.rotary_norm(site.ctx, self.width)
        self.qkv = parts.linear(3 * dim, dim, site, area="attention")
        self.sub_norm = parts.norm(dim, site) if config.sub_norm else None
        std = output_std(dim, site.depth)
        self.output = parts.linear(dim, dim, site, area="attention", std=std)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        reading: Reading | None = None,
        state: "Ring | None" = None,
    ) -> Flow:
        """Mix every position of (B, T, D) with those before it: see `Part.forward`."""
        qkv, x = project(self.qkv, x, norm, added)
        batch, length, dim = x.shape
        qkv = qkv.view(batch, length, 3, self.heads, self.width)
        if state is None:
            q, k, v = self.rotary_norm(qkv)  # (B, heads, T, head_width) each
            k, v = self.as_stored(k, v)
            if self.window is None or self.window >= length:
                y = attend_causally(q, k, v)
            else:
                y = attend_in_window(q, k, v, self.window)
        elif length == 1:
            y = state.attend_one(qkv)
        else:
            y = state.attend(*self.rotary_norm(qkv, state.here.angles))
        y = y.transpose(1, 2).reshape(batch, length, dim)
        return Flow(x, self.output(y, self.sub_norm))

    def step(self, x: Tensor, state: "Ring") -> Tensor:
        """Mix positions with those before them: see `Part.step`."""
        qkv = self.qkv.fused(x, normalise=True).view(*x.shape[:2], 3, self.heads, -1)
        if x.shape[1] > 1:
            y = state.attend(*self.rotary_norm(qkv, state.here.angles))
            y = y.transpose(1, 2).reshape(x.shape)
        elif self.output.takes_parts and state.leaves_parts(qkv):
            y = state.attend_in_parts(qkv)
        else:
            y = state.attend_one(qkv).view(x.shape)
        return self.output.fused(y, normalise=self.sub_norm is not None, added=x)

    def new_state(self, clock: Clock) -> "Ring":
        """Make rings for keys and values."""
        return Ring(clock, self.heads, self.width, self.window)

    def linears(self) -> tuple[nn.Module, ...]:
        """List the projections."""
        return self.qkv, self.output


@dataclass(frozen=True, slots=True)
class _Here:
    """Several positions that are being read."""

    angles: tuple[Tensor, Tensor]
    """Their rows of the rotary table."""
    slots: Tensor
    """Where they go."""
    before: Tensor | None = None
    """Slots of the positions before them, in the order of the text; None if they are the first."""
    mask: Tensor | None = None
    """(T, seen + T) bool: which of those before, and of themselves, each of them attends to."""


class Ring(State):
    """Rings of keys and values, (heads, W, d) each, or (B, heads, W, d) of several texts.

    The position p is in slot p mod W and stays until p + W comes; W is the window, or less for a
    text that is shorter. Keys were rotated by angles that only ever grow with p, and only
    differences of angles matter, so nothing is moved when the ring comes round. In eight bits keys
    and values are codes, and `exponents`, (2, heads, W) int8, are those of both.

    Args:
        clock: of the list of blocks.
        heads: of keys and values.
        width: d.
        window: positions that each one attends to; None is `ctx` of them.
    """

    def __init__(self, clock: Clock, heads: int, width: int, window: int | None) -> None:
        super().__init__(clock)
        self.window = min(window or clock.ctx, clock.ctx, clock.positions)
        clock.limit(self.window)
        self.short = window is not None
        """Whether the rings have the length of a window, however long the context."""
        texts, device = () if clock.texts is None else (clock.texts,), clock.device
        ring = (2, *texts, heads, self.window, width)
        self.keys, self.values = torch.zeros(ring, dtype=clock.stored or clock.dtype, device=device)
        self.exponents: Tensor | None = None
        if clock.stored:
            self.exponents = torch.zeros(ring[:-1], dtype=torch.int8, device=device)
        rows = table_rows(clock.positions, clock.ctx)
        self.table = rotary_table(rows, width, device)
        shape = (*texts, heads)
        self.tickets = clock.kept(
            ("tickets", heads), lambda: torch.zeros(shape, dtype=torch.int32, device=device)
        )

    def tensors(self) -> Iterator[Tensor]:
        """List the rings."""
        yield from (self.keys, self.values)
        if self.exponents is not None:
            yield self.exponents

    def of(self, text: int, clock: Clock) -> "Ring":
        """Make the rings of one of several texts."""
        own = Ring.__new__(Ring)
        State.__init__(own, clock)
        own.window, own.short, own.exponents, own.table = self.window, False, None, self.table
        own.keys, own.values = self.keys[text], self.values[text]
        own.tickets = self.tickets[text]
        return own

    @property
    def here(self) -> _Here:
        """Where the positions that are being read go, and what they attend to."""
        return self.clock.here(("ring", self.window, self.keys.shape[-1]), self._here)

    def _here(self) -> _Here:
        start, length, device = self.clock.start, self.clock.length, self.clock.device
        slots = torch.arange(start, start + length, device=device) % self.window
        angles = tuple(part[start : start + length] for part in self.table)
        if start == 0:
            return _Here(angles, slots)
        seen = min(start, self.window)
        before = torch.arange(start - seen, start, device=device) % self.window
        every = torch.ones(length, seen + length, dtype=torch.bool, device=device)
        return _Here(angles, slots, before, every.tril(seen).triu(seen - self.window + 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to the positions before and to the new ones, then store these.

        All are (1, heads, T, d), rotated and normalised.
        """
        if self.exponents is None:
            y = self._attend(q, k, v)
            self._store(self.keys, k[0])
            self._store(self.values, v[0])
            return y
        entries = [quantise_entries(new[0], self.keys.dtype) for new in (k, v)]
        k, v = (decode_entries(*entry, q.dtype)[None] for entry in entries)
        y = self._attend(q, k, v)
        rings = (self.keys, self.values)
        for ring, of_ring, (codes, exponents) in zip(rings, self.exponents, entries, strict=True):
            self._store(ring.view(torch.int8), codes.view(torch.int8))  # torch copies no e4m3 so
            self._store(of_ring, exponents)
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        here = self.here
        if here.before is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        keys, values = (
            torch.cat([self._before(index, ring, q.dtype), new[0]], dim=1)[None]
            for index, (ring, new) in enumerate(((self.keys, k), (self.values, v)))
        )
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=here.mask)

    def _before(self, index: int, ring: Tensor, dtype: torch.dtype) -> Tensor:
        """Read what is before the new positions in one of the rings."""
        before = self.here.before
        if self.exponents is None:
            return ring[:, before]
        codes = ring.view(torch.int8)[:, before].view(ring.dtype)
        return decode_entries(codes, self.exponents[index][:, before], dtype)

    def _store(self, ring: Tensor, new: Tensor) -> None:
        ring.index_copy_(1, self.here.slots, new)

    def attend_one(self, qkv: Tensor) -> Tensor:
        """Store one new position, of each text that goes on, and attend to the last W.

        No shape depends on the position.

        Args:
            qkv: (B, 1, 3, heads, d) as the projection gave it; B is 1 without several texts.

        Returns:
            (B, heads, 1, d).
        """
        clock = self.clock
        about = (clock.position, *self.table, self.tickets, NORM_EPS)
        if clock.texts is not None:
            return decode_attention_rows(qkv[:, 0], self.keys, self.values, *about)[:, :, None]
        if self.exponents is None:
            y = decode_attention(qkv[0, 0], self.keys, self.values, *about, self.short)
        else:
            rings = (self.keys, self.values, self.exponents)
            y = decode_attention_8bit(qkv[0, 0], *rings, *about)
        return y[None, :, None]

    def leaves_parts(self, qkv: Tensor) -> bool:
        """Whether `attend_in_parts` is for this; a short ring has a program for all of a head."""
        one = self.clock.texts is None
        return one and self.exponents is None and not self.short and fits_parts(qkv)

    def attend_in_parts(self, qkv: Tensor) -> AttentionParts:
        """Do as `attend_one` of one text, but leave the parts to the kernel that reads them."""
        about = (self.clock.position, *self.table, NORM_EPS)
        return attend_parts(qkv[0, 0], self.keys, self.values, *about)

"""Multi-head attention with fused projections and rotary position embedding.

With x the normalised stream, n(v) = v / sqrt(mean(v**2) + eps) over a head of width d, and R_t the
rotation by the angles of position t:

    (1) x Q^T + b = queries, keys and values; there may be fewer heads of keys and values
    (2) q = R_t n(q) * g,  k = R_t n(k) * h; with `query_key_norm` `unit` g = h = 1, and with `none`
        n is omitted, too
    (3) y[t] = sum over s of exp(q[t] . k[s] / sqrt(d)) v[s], divided by the sum of these weights
        and the exp of the head's sink, if there is one
    (4) stream + norm(y) O^T + c

In (2) the gains are applied before the rotation, which rotates the elements i and i + d / 2 of a
head as a pair, as Llama and its descendants do in Transformers. Without gains the order does not
matter, and kernels rotate first. With grouped-query attention, adjacent query heads share a key
head. If a window has several documents, s only runs over the positions of t's document. Angles need
not restart at each document, as only their differences matter.

If `fits_kernels`, kernels compute all of this. Otherwise a kernel computes q and k, and torch the
rest.

A model is trained on windows of `ctx` positions, so in each block a position attends to itself and
the `ctx` - 1 positions before it. This equals a forward over the complete text with a banded causal
mask. In a masked model a position attends to the complete window, or with a sliding window to as
many positions after it as before it.

Keys and values can be stored in eight bits: see `eight_bits`. A position then attends to quantised
keys and values, including its own, in decoding and in a prefill alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.families import SPECULATIVE_ATTENTION
from arbcli.kernels.attention.decode_attention import SpeculativeRings, decode_attention
from arbcli.kernels.runtime.backend import backend_of
from arbcli.model.layers import attend
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.rotary import rotary_table, rows_at, table_for, table_rows
from arbcli.model.parts.base import BlockInputs, BlockOutput, fits_vectors, project
from arbcli.model.parts.cached import CachedAttention
from arbcli.model.parts.window import attend_in_window
from arbcli.model.state import PositionCounter, Rows, State

if TYPE_CHECKING:
    from arbcli.kernels.attention.attend_parts import AttentionParts


SPLIT_ATTENTION = "arbcli.kernels.attention.attend_parts"
"""Module of split-KV attention, for a single text on a GPU."""


def fits_kernels(config: AttentionConfig) -> bool:
    """Return whether the fused attention kernels support a configuration."""
    unit = config.query_key_norm == "unit" and config.rotary.stretch == 1
    return unit and config.key_heads == config.heads and not (config.bias or config.sink)


class Attention(CachedAttention):
    """Self-attention with rotary position embedding."""

    draws = ("qkv", "bias", "query_gain", "key_gain", "sinks", "sub_norm", "output", "output_bias")
    name = "attention"
    steps_positions = rounds_queries = ends_with_product = True

    def __init__(self, config: AttentionConfig, spec: LayerSpec) -> None:
        super().__init__()
        parts, dim = layers_for(spec), spec.dim
        self.heads, self.kv_heads, self.width = config.heads, config.key_heads, config.width(spec)
        self.window, self.rotary = config.window, config.rotary
        self.rotated, self.causal = config.rotated(spec), spec.causal
        self.eps = None if config.query_key_norm == "none" else spec.norm_eps
        inner, kv = self.heads * self.width, self.kv_heads * self.width
        self.fits_kernels = fits_kernels(config)
        self.fused_backward = self.fits_kernels and spec.weights == "ternary"
        self.steps_fused = fits_vectors(inner)
        self.speculates = self.fits_kernels
        rotary = spec.ctx, self.width, self.rotary
        if self.fits_kernels:
            self.rotary_norm = parts.rotary_norm(*rotary)
        else:
            self.rotary_qkv = parts.rotary_qkv(*rotary)
        self.qkv = parts.linear(inner + 2 * kv, dim, spec, area="attention")
        self.bias = self.query_gain = self.key_gain = self.sinks = self.output_bias = None
        if config.bias:
            self.bias = parts.vector([0.0] * (inner + 2 * kv), spec, area="attention")
        if config.query_key_norm == "gain":
            self.query_gain = parts.vector([1.0] * self.width, spec, area="attention")
            self.key_gain = parts.vector([1.0] * self.width, spec, area="attention")
        if config.sink:
            self.sinks = parts.vector([0.0] * self.heads, spec, area="attention")
        norm = parts.rounded_norm if config.bitnet else parts.norm
        self.sub_norm = norm(inner, spec) if config.sub_norm else None
        self.output = parts.output(inner, spec, area="attention")
        if config.output_bias:
            self.output_bias = parts.vector([0.0] * dim, spec, area="attention")

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: "KVCache | None" = None,
    ) -> BlockOutput:
        """Attend from each position of (B, T, D): see `Part.forward`."""
        qkv, x = project(self.qkv, x, norm, added)
        batch, length, _ = x.shape
        if self.fits_kernels:
            qkv = qkv.view(batch, length, 3, self.heads, self.width)
        if state is None:
            y = self._attend(qkv, inputs or BlockInputs())
        elif self.fits_kernels and length == 1 and state.fuses:
            y = state.attend_one(qkv)
        else:
            y = self._attend_after(state, qkv)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        return BlockOutput(x, self._biased(self.output(y, self.sub_norm)))

    def _sinks(self) -> Tensor | None:
        return self.sinks() if self.sinks else None

    def _biased(self, y: Tensor) -> Tensor:
        """Add the bias of the output projection, if any."""
        return y + self.output_bias().to(y.dtype) if self.output_bias else y

    def _split_heads(
        self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (1) and (2) from the projection's output, (B, T, all heads * d).

        Returns:
            Queries (B, heads, T, d), keys and values (B, kv_heads, T, d).
        """
        if self.bias:
            qkv = qkv + self.bias().to(qkv.dtype)
        gains = None
        if self.query_gain and self.key_gain:
            gains = torch.stack((self.query_gain(), self.key_gain()))
        heads = qkv.unflatten(-1, (-1, self.width))
        return self.rotary_qkv(heads, gains, self.kv_heads, self.eps, angles)

    def _attend(self, qkv: Tensor, inputs: BlockInputs) -> Tensor:
        """Compute (2) and (3) within windows, or within their documents."""
        length, sink, documents = qkv.shape[1], self._sinks(), inputs.documents
        dropout = inputs.dropout.attention if inputs.dropout else None
        window = None if self.window is None or self.window >= length else self.window
        restrictions = (window, documents, dropout, sink)
        is_plain = self.causal and all(part is None for part in restrictions)
        if self.fused_backward and is_plain and self.cache_format.code_dtype is None:
            return attend.attend_rotated(qkv, table_for(qkv, self.rotary))
        prepare = self.rotary_norm if self.fits_kernels else self._split_heads
        q, k, v = prepare(qkv, None)  # (B, heads, T, width) each
        (k,), (v,) = self.cache_format.round(k, rotated=self.rotated), self.cache_format.round(v)
        q = self.cache_format.round_queries(q, self.rotated)
        if is_plain:
            return attend.attend_causally(q, k, v)
        k, v = (attend.repeat_heads(part, self.heads // self.kv_heads) for part in (k, v))
        if documents is None and sink is None and dropout is None:
            if window is not None:
                return attend_in_window(q, k, v, window, causal=self.causal)
            return functional.scaled_dot_product_attention(q, k, v)
        mask = None  # causal
        if documents is not None:
            mask = documents.limit(self.window)
        elif window is not None or not self.causal:
            mask = attend.positions_seen(length, window, self.causal, q.device)
        if dropout is not None:
            from arbcli.model.layers.attend_dropped import attend_dropped

            return attend_dropped(q, k, v, dropout, seen=mask, sink=sink)
        if sink is not None:
            return attend.attend_with_sink(q, k, v, sink, mask)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def step(self, x: Tensor, state: "KVCache", residual: Tensor | None) -> Tensor:
        """Attend from new positions: see `Part.step`."""
        qkv = self.qkv.fused(x, normalise=True, early=self.fits_kernels)
        if self.fits_kernels:
            qkv = qkv.view(*x.shape[:2], 3, self.heads, self.width)
        if state.clock.is_speculative:
            return self._projected(state.attend_ahead(qkv, split=self.output.takes_parts), residual)
        if not self.fits_kernels or x.shape[1] > 1:
            y = state.map_texts(self._attend_after, qkv)
            y = y.transpose(1, 2).reshape(*x.shape[:2], -1)
        elif self.output.takes_parts and state.splits_attention(qkv):
            return self._projected(state.attend_split(qkv), residual)
        else:
            y = state.attend_one(qkv).view(len(x), 1, -1)
        return self._projected(y, residual)

    def _projected(self, y: "Tensor | AttentionParts", residual: Tensor | None) -> Tensor:
        normalise, early = self.sub_norm is not None, self.output_bias is None
        return self._biased(self.output.fused(y, normalise=normalise, added=residual, early=early))

    def _attend_after(self, state: "KVCache", qkv: Tensor) -> Tensor:
        prepare = self.rotary_norm if self.fits_kernels else self._split_heads
        q, k, v = prepare(qkv, state.angles)
        q = state.clock.cache_format.round_queries(q, self.rotated)
        return state.attend(q, k, v, self._sinks())

    def new_state(self, clock: PositionCounter) -> "KVCache":
        """Create the ring buffers of keys and values for a text."""
        return KVCache(clock, self.kv_heads, self.width, self.window, self.rotary, self.rotated)

    def linears(self) -> tuple[nn.Module, ...]:
        """Return the projections."""
        return self.qkv, self.output


@dataclass(frozen=True, slots=True)
class _RingSlots:
    """Slots of a ring and attention mask for the positions being read."""

    slots: Tensor
    """Slots of the new positions."""
    previous: Tensor | None = None
    """Slots of the previous positions in the order of the text; None if there are none."""
    mask: Tensor | None = None
    """(T, previous + T) bool attention mask over the previous and the new positions; for a single
    position (1, W), over the slots of the ring after it is stored."""


class KVCache(State):
    """Ring buffers of keys and values, (heads, W, d) each, or (B, heads, W, d) for a batch.

    Position p is in slot p mod W until p + W overwrites it; W is the window, or the length of a
    shorter text. Keys are stored rotated, as only differences of angles matter. In eight bits, keys
    and values are codes with `exponents`, (2, heads, W) int8. In a mixed format, whose rotated
    elements are not quantised, torch reads them instead of the fused kernels.

    Args:
        clock: position counter of the stack of blocks.
        heads: number of key heads.
        width: d.
        window: number of positions that each one attends to; None is `ctx`.
        rotary: configuration of the angles.
        rotated: number of elements of a key that are rotated.
    """

    stored, views = ("keys", "values"), ("exponents", "semaphores")

    def __init__(
        self,
        clock: PositionCounter,
        heads: int,
        width: int,
        window: int | None,
        rotary: RotaryConfig = PLAIN,
        rotated: int = 0,
    ) -> None:
        super().__init__(clock)
        self.window = min(window or clock.ctx, clock.ctx, clock.positions)
        clock.limit(self.window)
        self.has_window = window is not None
        """Whether the ring has the length of a sliding window, independent of the context."""
        self.width, self.rotary = width, rotary
        rows = table_rows(clock.positions, clock.ctx)
        self.table = rotary_table(rows, width, clock.device, rotary=rotary, first=clock.first)
        self.fuses = not clock.cache_format.mixed
        """Whether the fused kernels support the storage format."""
        self.exponents: Tensor | None = None
        if self.fuses and clock.cache_format.code_dtype:
            self.exponents = clock.zeros(2, heads, self.window, dtype=torch.int8)
        key_exponents, value_exponents = (
            (None, None) if self.exponents is None else self.exponents.unbind(-3)
        )
        ring = clock, self.window, heads, width
        self.keys = Rows(*ring, rotated, heads_first=True, exponents=key_exponents)
        self.values = Rows(*ring, heads_first=True, exponents=value_exponents)
        self.semaphores = clock.semaphores(heads)

    _speculative_rows: Tensor | None = None

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions being read, (T, d / 2) each."""
        clock, key = self.clock, ("angles", self.width, self.rotary)
        return clock.shared(key, lambda: rows_at(self.table, clock.position_ids))

    @property
    def ring_slots(self) -> _RingSlots:
        """Slots and attention mask of the positions being read, shared by rings of one length."""
        return self.clock.shared(("ring", self.window), self._new_ring_slots)

    def _new_ring_slots(self) -> _RingSlots:
        if self.clock.length == 1:  # independent of the position on the host, for CUDA graphs
            mask = torch.arange(self.window, device=self.clock.device) <= self.clock.position
            return _RingSlots(self.clock.position_ids % self.window, mask=mask[None])
        start, length, device = self.clock.start, self.clock.length, self.clock.device
        slots = torch.arange(start, start + length, device=device) % self.window
        if start == 0:
            return _RingSlots(slots)
        count = min(start, self.window)
        previous = torch.arange(start - count, start, device=device) % self.window
        mask = torch.ones(length, count + length, dtype=torch.bool, device=device)
        return _RingSlots(slots, previous, mask.tril(count).triu(count - self.window + 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        """Store new positions, and attend from them to all positions.

        For a single position no shape depends on the number of previous ones.

        Args:
            q: (1, H, T, d), normalised and rotated.
            k: (1, heads, T, d), normalised and rotated.
            v: like k.
            sink: (H,) float32, logits of the sinks; None for no sinks.

        Returns:
            (1, H, T, d).
        """
        ring, previous = self.ring_slots, None
        if ring.previous is not None:  # read before new positions overwrite them
            previous = [rows.get(ring.previous) for rows in (self.keys, self.values)]
        keys, values = self.keys.put(ring.slots, k[0]), self.values.put(ring.slots, v[0])
        if self.clock.length == 1:
            keys, values = self.keys.get(), self.values.get()
        elif previous is not None:
            keys, values = (
                torch.cat((old, new), dim=1)
                for old, new in zip(previous, (keys, values), strict=True)
            )
        return attend.attend_to(q, keys, values, ring.mask, sink)

    def attend_one(self, qkv: Tensor) -> Tensor:
        """Store one new position of each text, and attend from it to the last W.

        No shape depends on the position.

        Args:
            qkv: (B, 1, 3, heads, d), output of the projection; B is 1 for a single text.

        Returns:
            (B, heads, 1, d).
        """
        clock, (cos, sin) = self.clock, self.table
        y = decode_attention(
            qkv.view(*clock.position.shape, *qkv.shape[2:]), self.keys.codes, self.values.codes,
            clock.position, cos, sin, self.semaphores, NORM_EPS, self.has_window, self.exponents,
        )  # fmt: skip
        return y.view(-1, *y.shape[-2:])[:, :, None]

    def splits_attention(self, qkv: Tensor) -> bool:
        """Return whether to use `attend_split`; short rings have one program per head.

        Args:
            qkv: (B, 1, 3, heads, d), output of the projection.
        """
        if self.clock.texts is not None or self.exponents is not None or self.has_window:
            return False
        return backend_of(qkv) == "triton" and import_module(SPLIT_ATTENTION).fits_parts(qkv)

    def attend_split(self, qkv: Tensor) -> "AttentionParts":
        """Run split-KV `attend_one` for a single text, without the final reduction.

        Args:
            qkv: (1, 1, 3, heads, d), output of the projection.
        """
        cos, sin = self.table
        return import_module(SPLIT_ATTENTION).attend_parts(
            qkv[0, 0], self.keys.codes, self.values.codes, self.clock.position, cos, sin, NORM_EPS
        )

    def attend_ahead(self, qkv: Tensor, *, split: bool) -> Tensor:
        """Attend from speculative positions, which are only stored once they are accepted.

        Args:
            qkv: (1, M, 3, heads, d), output of the projection.
            split: whether single positions use `attend_split`, which these must equal bitwise.

        Returns:
            (1, M, heads * d).
        """
        speculative = import_module(SPECULATIVE_ATTENTION)
        position, (cos, sin) = self.clock.position, self.table
        rings = qkv[0], self.keys.codes, self.values.codes, self.speculative_rows(qkv.shape[1])
        if split and self.splits_attention(qkv):
            return speculative.attend_ahead(*rings, position, cos, sin, NORM_EPS)[None]
        y = speculative.attend_in_turn(
            *rings, position, cos, sin, self.semaphores, NORM_EPS, self.has_window
        )
        return y.flatten(1)[None]

    def speculative_rows(self, positions: int) -> Tensor:
        """Return the buffer of speculative keys and values, (2, M, heads, d)."""
        heads, _, width = self.keys.codes.shape
        if self._speculative_rows is None or self._speculative_rows.shape[1] != positions:
            shape = 2, positions, heads, width
            self._speculative_rows = torch.zeros(
                shape, dtype=self.clock.dtype, device=self.clock.device
            )
        return self._speculative_rows

    def speculative_rings(self, positions: int) -> Iterator[SpeculativeRings]:
        """Yield the rings with the buffer of speculative keys and values."""
        yield SpeculativeRings(self.keys.codes, self.values.codes, self.speculative_rows(positions))

"""Compressed attention: to recent bytes, and to pooled entries that an indexer may select.

With x the normalised stream, m the bytes of an entry, n(v) = v / sqrt(mean(v**2) + eps) over a
head, and R_t the rotation by the angles of position t:

    (1) x[t] Q = queries;  x[t] K, x[t] V, x[t] A = keys, values and pooling logits
    (2) r[t] = R_t n(x[t] K)                                          uncompressed byte
    (3) v[j] = n(sum over t of block j of softmax over t (A[t] + beta[t mod m]) * V[t])
    (4) c[j] = R_(j m) v[j]                                           entry of block j
    (5) y[t] = attention to r of the last W bytes, to c, and to a sink: `kernels.attention
        .compressed_attention`; entry j is visible once byte j m + m - 1 is read
    (6) stream + norm(y) O

Softmax and product of (3) are elementwise; beta and the sinks are learned. With `pooling = "mean"`
there are no A and beta, and v[j] is n of the mean of V. With `key_gain`, learned gains multiply n
in (2), and v[j] in (4).

If entries are short there are many, and an indexer selects some. Each byte t = g m - 1 that
completes an entry selects among g entries, for itself and the m - 1 bytes after it:

    (7) s[g, j] = sum over h of w[h] max(0, q[h] . k[j]) / sqrt(heads d)
        q[h], w = x[t] I, and k[j] = v[j] J; q and k are normalised and rotated like Q x and c
    (8) the k entries of the largest s are attended to: `kernels.attention.choose_entries`
    (9) divergence = mean over g of KL(p[g] || softmax s[g]) over the chosen entries

p[g] is the attention to each of them, summed over heads and the group's bytes, and normalised. The
inputs x, v and p of the indexer are detached, so that only the indexer learns from (9), and from
nothing else. With at most k entries all are selected, and the attention is bitwise equal to that
without an indexer.

Sources: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, for the indexer and (9); (3) is the compressor of
its successor, which selects for each token rather than for groups.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.compressed.kernels.choose_entries import choose_entries as choose_by_scores
from arbcli.families.compressed.kernels.compress_blocks import (
    compress_blocks,
    compress_blocks_backward,
)
from arbcli.families.compressed.kernels.compressed_attention import Sight, compressed_attention
from arbcli.families.compressed.kernels.compressed_attention_backward import (
    compressed_attention_backward,
)
from arbcli.families.compressed.kernels.sum_choices import sum_choices
from arbcli.families.compressed.state import CompressedState, takes_all
from arbcli.kernels.attention.rotary_norm import rotate
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS, unit_rms
from arbcli.model.layers.products import LowPrecision
from arbcli.model.layers.rotary import Angles, broadcast_heads, rotary_table, rows_at
from arbcli.model.parts.base import BlockInputs, BlockOutput, fits_vectors, project
from arbcli.model.parts.cached import CachedAttention
from arbcli.model.state import PositionCounter

SINK = 1.0
"""Initial logit of the sinks."""
TINY = 1e-30
"""Minimum of a denominator."""


class _Attend(Function):
    """Attention to entries; the shares and the selection have no gradient."""

    @staticmethod
    def forward(
        x: Tensor,
        recent: Tensor,
        entries: Tensor,
        chosen: Tensor | None,
        sink: Tensor,
        cos: Tensor,
        sin: Tensor,
        sight: Sight,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, logs, shares = compressed_attention(
            x, recent, entries, chosen, sink, cos, sin, sight, NORM_EPS
        )
        return y, logs, x.new_empty(0) if shares is None else shares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *saved, ctx.sight = inputs
        ctx.save_for_backward(*output[:2], *saved)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        inputs = (*ctx.saved_tensors, ctx.sight, NORM_EPS)
        grad_x, *grads = compressed_attention_backward(grad_y.contiguous(), *inputs)
        grad_recent, grad_entries = (grad.to(grad_x.dtype) for grad in grads[:2])
        return grad_x, grad_recent, grad_entries, None, grads[2], None, None, None


class _Compress(Function):
    """Keys of recent bytes and of entries, rotated, and the entries before the rotation."""

    @staticmethod
    def forward(
        x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return compress_blocks(x, beta, cos, sin, heads, NORM_EPS)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *saved, ctx.heads = inputs
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(
        ctx: Any, grad_recent: Tensor, grad_entries: Tensor, _still: Any
    ) -> tuple[Tensor | None, ...]:
        inputs = (grad_recent, grad_entries, *ctx.saved_tensors, ctx.heads, NORM_EPS)
        return *compress_blocks_backward(*inputs), None, None, None


class _SelectedKeys(Function):
    """The keys of selected entries, (B, N, k, width); arbitrary ones for -1."""

    @staticmethod
    def forward(keys: Tensor, chosen: Tensor, entries: int) -> Tensor:
        rows = torch.arange(len(keys), device=keys.device)[:, None, None]
        return keys[rows, chosen.clamp(min=0)]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, chosen, ctx.entries = inputs
        ctx.save_for_backward(chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (chosen,) = ctx.saved_tensors
        return sum_choices(grad.contiguous(), chosen, ctx.entries).to(grad.dtype), None, None


_attend, _compress = operator(_Attend), operator(_Compress)
_selected_keys = operator(_SelectedKeys)


@operator
def choose_entries(
    q: Tensor, w: Tensor, k: Tensor, first: int, max_entries: int, top_k: int
) -> Tensor:
    """Select entries by their scores, (B, N, k) int32: see the kernel `choose_entries`."""
    return choose_by_scores(q, w, k, first, max_entries, top_k)


class Indexer(nn.Module, LowPrecision):
    """Scores entries for each group of bytes, to select those it attends to.

    Args:
        config: configuration of the attention.
        spec: storage settings and width of the stage.
    """

    draws = ("query", "key")
    fp8 = False
    """Whether scores are computed in FP8: see `build_model`."""

    def __init__(self, config: CompressedAttentionConfig, spec: LayerSpec) -> None:
        super().__init__()
        parts = layers_for(spec)
        self.heads, self.width = config.index_heads, config.index_width
        self.top_k, self.norm_gain = config.top_k, spec.norm_gain
        self.query = parts.linear(self.heads * (self.width + 1), spec.dim, spec, area="indexer")
        self.key = parts.linear(
            self.width, config.kv_heads * config.width(spec), spec, area="indexer"
        )

    def multiply_in(self, number_format: str) -> bool:
        """Score in FP8: see `LowPrecision`; an indexer has no matrix of its own."""
        self.fp8 = number_format == "fp8"
        return False

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of `length` positions, (length, width / 2) float32 each.

        Half of a head is rotated; the other angles are 0.
        """
        return rotary_table(length, self.width, device, self.width // 2)

    def queries(
        self, x: Tensor, norm: nn.Module | None, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute queries and head weights of the bytes that complete entries.

        Args:
            x: (B, N, D), the stream at these bytes.
            norm: norm of x; None if x is normalised.
            angles: cosines and sines of their positions, (N, width / 2) each.

        Returns:
            Queries, (B, N, h, width), and weights, (B, N, h), in the dtype of x.
        """
        if norm and self.norm_gain:  # detaches the gains too
            with torch.no_grad():
                x, norm = norm(x), None
        q, w = self.query(x.detach(), norm).split((self.heads * self.width, self.heads), dim=-1)
        q = rotated(q.unflatten(-1, (self.heads, self.width)), broadcast_heads(angles))
        return q, w * (self.heads * self.width) ** -0.5

    def keys(self, entries: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Compute keys, (B, E, width), of entries before their rotation, (B, E, G, d)."""
        return rotated(self.key(entries.detach().flatten(2)), angles)

    def choose(
        self,
        q: Tensor,
        w: Tensor,
        keys: Tensor,
        first: int,
        max_entries: int,
        *,
        low_precision: bool = False,
    ) -> Tensor:
        """Select entries: see `choose_entries`.

        Keys are rounded to e4m3 with `low_precision`, as a quantised cache does; keys and queries
        are, if scores are computed in FP8. They are normalised, so that none overflows.
        """
        q, w, keys = (part.detach() for part in (q, w, keys))
        if self.fp8:
            q, keys = q.to(E4M3), keys.to(E4M3)
        elif low_precision:
            keys = keys.to(E4M3).to(q.dtype)
        return choose_entries(q, w, keys, first, max_entries, self.top_k)

    def divergence(
        self,
        q: Tensor,
        w: Tensor,
        keys: Tensor,
        chosen: Tensor,
        shares: Tensor,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Compute the divergence (9), a float32 scalar.

        Args:
            q: (B, N, h, width).
            w: (B, N, h).
            keys: (B, E, width).
            chosen: (B, N, k) int32, selected entries.
            shares: (B, N, k) float32, attention to each of them.
            valid: (B, N) bool mask of the groups; None for all.
        """
        chosen = chosen.contiguous()
        chosen_keys = _selected_keys(keys, chosen, keys.shape[1])
        dots = torch.einsum("bnhd,bnkd->bnhk", q, chosen_keys).relu()
        scores = (dots.float() * w.float()[..., None]).sum(dim=2)
        is_entry = chosen >= 0
        learned = scores.masked_fill(~is_entry, -torch.inf).log_softmax(dim=-1)
        learned = learned.masked_fill(~is_entry, 0)
        target = shares / shares.sum(dim=-1, keepdim=True).clamp(min=TINY)
        distance = target * (target.clamp(min=TINY).log() - learned)
        distance = distance.sum(dim=-1)
        if valid is None:
            return distance.mean()
        return (distance * valid).sum() / valid.sum().clamp(min=1)


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """Normalise vectors (..., d) and rotate them by broadcast angles, in the dtype of x."""
    return rotate(unit_rms(x.float()), *angles).to(x.dtype)


class CompressedAttention(CachedAttention):
    """Causal self-attention to recent positions and to compressed entries."""

    draws = ("projection", "beta", "key_gain", "sink", "sub_norm", "output", "indexer")
    name = "attention"
    rounds_queries = True

    def __init__(self, config: CompressedAttentionConfig, spec: LayerSpec) -> None:
        super().__init__()
        parts = layers_for(spec)
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.width(spec)
        self.rotated, self.ratio = config.rotated(spec), config.ratio
        self.completes_entries = spec.ctx >= self.ratio
        self.sight = Sight(config.window, self.ratio, config.entries(spec))
        self.inner, self.kv = self.heads * self.width, self.kv_heads * self.width
        projected = self.inner + config.vectors * self.kv
        self.projection = parts.linear(projected, spec.dim, spec, area="attention")
        self.beta = self.key_gain = None
        if config.pooling == "softmax":
            self.beta = parts.taps(self.kv, self.ratio, spec, area="attention")
        if config.key_gain:
            self.key_gain = parts.vector([1.0] * self.width, spec, area="attention")
        self.sink = parts.vector([SINK] * self.heads, spec, area="attention")
        self.sub_norm = parts.norm(self.inner, spec) if config.sub_norm else None
        self.output = parts.output(self.inner, spec, area="attention")
        self.indexer = Indexer(config, spec) if config.top_k is not None else None
        widths = (self.inner, self.kv) if self.indexer else (self.inner,)
        self.steps_fused = self.key_gain is None and fits_vectors(*widths)

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Return the names of pooling and indexer, if the context is shorter than an entry."""
        return () if self.completes_entries else ("beta", "indexer")

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: CompressedState | None = None,
    ) -> BlockOutput:
        """Attend from each position of (B, T, D): see `Part.forward`.

        While gradients are recorded, the losses include the divergence of the indexer.
        """
        projected, x = project(self.projection, x, norm, added)
        batch, length, _ = x.shape
        q, kv_inputs = self._split_queries(projected)
        q = q.unflatten(-1, (self.heads, self.width))
        cached = self.cache_format if state is None else state.clock.cache_format
        q = cached.round_queries(q, self.rotated)
        if state is not None:
            y = state.attend(x, norm, q, *kv_inputs.split(self.kv, dim=-1))
            return BlockOutput(x, self.output(y.reshape(batch, length, self.inner), self.sub_norm))
        table = self.table(length, x.device)
        recent, entries, still = self._compressed(kv_inputs, table)
        number = entries.shape[1]
        recent, entries = self.cache_format.round(recent, entries, rotated=self.rotated)
        chosen, index_inputs = None, None
        if self.indexer:
            index_inputs, chosen = self._choose(self.indexer, x, norm, still)
        sink, sight = self.sink(), self.sight
        selection = None if takes_all(chosen, number, sight) else chosen
        y, _, shares = _attend(q, recent, entries, selection, sink, *table, sight)
        losses = {}
        if self.indexer and index_inputs and chosen is not None and torch.is_grad_enabled():
            if selection is None:
                with torch.no_grad():
                    shares = _attend(q, recent, entries, chosen, sink, *table, sight)[2]
            valid = inputs.valid if inputs else None
            if valid is not None:  # groups with empty slots do not count
                last = self.ratio * torch.arange(2, number + 2, device=x.device) - 2
                valid = valid[:, last.clamp(max=length - 1)]
            divergence = self.indexer.divergence(*index_inputs, chosen[:, 1:], shares[:, 1:], valid)
            losses["indexer"] = [divergence]
        return BlockOutput(x, self.output(y.flatten(2), self.sub_norm), losses)

    def step(self, x: Tensor, state: CompressedState, residual: Tensor | None) -> Tensor:
        """Attend from one new position: see `Part.step`."""
        q, new = self._split_queries(self.projection.fused(x, normalise=True))
        beta = self.beta.prepared() if self.beta else state.no_beta
        assert beta is not None
        still = state.append(new.unflatten(-1, (3, self.kv_heads, -1)), beta)
        if self.indexer:
            query = self.indexer.query.fused(x, normalise=True)
            state.choose(query, self.indexer.key.fused(still.flatten(2), normalise=False))
        y = state.attend_one(q.unflatten(-1, (self.heads, -1)), self.sink.prepared())
        return self.output.fused(y.flatten(2), normalise=self.sub_norm is not None, added=residual)

    def new_state(self, clock: PositionCounter) -> CompressedState:
        """Create the ring buffers of recent positions and entries."""
        return CompressedState(clock, self)

    def _split_queries(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Split the projection into queries, (..., H d), and keys, values and gates, (..., 3 G d).

        With mean pooling the gates are zero.
        """
        # not slices, whose gradients are padded with zeros and added up
        q, inputs = projected.split((self.inner, projected.shape[-1] - self.inner), dim=-1)
        if self.beta is None:
            inputs = functional.pad(inputs, (0, self.kv))
        return q, inputs

    def gate_bias(self, device: torch.device) -> Tensor:
        """Return beta, (G d, m) float32; zeros with mean pooling."""
        if self.beta is None:
            return torch.zeros(self.kv, self.ratio, device=device)
        return self.beta()

    def _compressed(
        self, inputs: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (2) to (4): bytes, entries, and entries before the rotation, (B, n, G, d)."""
        beta = self.gate_bias(inputs.device)
        if self.key_gain is None:
            return _compress(inputs, beta, *table, self.kv_heads)
        cos, sin = table
        flat = torch.ones_like(cos), torch.zeros_like(sin)
        recent, entries, still = _compress(inputs, beta, *flat, self.kv_heads)
        here = broadcast_heads(table)
        starts = rows_at(here, slice(0, entries.shape[1] * self.ratio, self.ratio))
        recent, entries = self.placed(recent, here), self.placed(entries, starts)
        return recent.to(inputs.dtype), entries.to(inputs.dtype), still

    def _choose(
        self, indexer: Indexer, x: Tensor, norm: nn.Module | None, still: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor] | None, Tensor]:
        """Select entries for each group; return the indexer's inputs, and (B, N, k) int32."""
        (batch, length, _), number = x.shape, still.shape[1]
        if not number:
            return None, torch.empty(batch, 1, 0, dtype=torch.int32, device=x.device)
        table = indexer.table(length, x.device)
        ends = slice(self.ratio - 1, None, self.ratio)
        q, w = indexer.queries(x[:, ends], norm, rows_at(table, ends))
        k = indexer.keys(still, rows_at(table, slice(0, number * self.ratio, self.ratio)))
        with torch.no_grad():
            is_quantised = self.cache_format.code_dtype is not None
            chosen = indexer.choose(q, w, k, 1, self.sight.max_entries, low_precision=is_quantised)
            # bytes before the first complete entry select none
            chosen = functional.pad(chosen, (0, 0, 1, 0), value=-1)
        return (q, w, k), chosen

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of `length` positions, (length, d / 2) float32 each."""
        return rotary_table(length, self.width, device, self.rotated)

    def place_recent(self, recent: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Normalise and rotate bytes, (B, T, G d), by the angles of their positions.

        Returns:
            (B, T, G, d).
        """
        x = recent.unflatten(-1, (self.kv_heads, -1)).float()
        return self.placed(unit_rms(x), broadcast_heads(angles)).to(recent.dtype)

    def placed(self, x: Tensor, angles: Angles) -> Tensor:
        """Multiply normalised (..., d) by the gains, if any, and rotate it; float32."""
        if self.key_gain:
            x = x.float() * self.key_gain()
        return rotate(x, *angles)

    def compress(self, values: Tensor, gates: Tensor) -> Tensor:
        """Pool blocks, (B, E, m, G d), to entries, (B, E, G, d), normalised but not rotated."""
        share = torch.softmax(gates.float() + self.gate_bias(gates.device).T, dim=2)
        entries = (share * values.float()).sum(dim=2).unflatten(-1, (self.kv_heads, -1))
        return unit_rms(entries).to(values.dtype)

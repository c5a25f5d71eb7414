"""Attention of a dense block to entries of several bytes, which an indexer may choose.

With x the normalised stream, m the bytes of an entry, n(v) = v / sqrt(mean(v**2) + eps) over a
head, and R_t the turn by the angles of position t:

    (1) x[t] Q = queries of the heads;  x[t] K, x[t] V, x[t] A = vectors of the heads of keys
    (2) r[t] = R_t n(x[t] K)                                          the byte as it is
    (3) v[j] = n(sum over t of block j of softmax over t (A[t] + beta[t mod m]) * V[t])
    (4) c[j] = R_(j m) v[j]                                           the entry of block j
    (5) y[t] = attention to r of the last W bytes, to c, and to a sink: `kernels.attention
        .compressed_attention`; entry j is seen once byte j m + m - 1 is read
    (6) stream + norm(y) O

Softmax and product of (3) are of each number by itself; beta and the sinks of heads are learned.
With `pooling` of `mean` there are neither A nor beta, and v[j] is n of the mean of V; with
`key_gain` learned gains multiply n in (2), and v[j] in (4).

Where an entry has few bytes there are many, and an indexer chooses. A choice is made by each byte
t = g m - 1 that completes an entry, for itself and the m - 1 bytes after it, among g entries:

    (7) s[g, j] = sum over h of w[h] max(0, q[h] . k[j]) / sqrt(heads d)
        q[h], w = x[t] I, and k[j] = v[j] J; q and k are normalised and rotated like Q x and c
    (8) the k entries of the largest s are attended to: `kernels.attention.choose_entries`
    (9) divergence = mean over g of KL(p[g] || softmax s[g]) over the chosen entries

p[g] is the share that attention gave to each of them, added up over heads and the group's bytes,
and divided by the sum. What the indexer is given (x, v, p) is cut off from gradients, so it learns
from (9) alone, and nothing else does. With k entries or fewer all are chosen, and the attention is
the same as without an indexer, bit by bit.

Sources: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, for the indexer and (9); (3) is the compressor of
its successor, whose choices are of single tokens' and not of groups.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from arbcli.config.parts.compressed_attention import CompressedAttentionConfig
from arbcli.config.site import Site
from arbcli.kernels.attention.choose_entries import choose_entries as choose_by_scores
from arbcli.kernels.attention.compress_blocks import compress_blocks, compress_blocks_backward
from arbcli.kernels.attention.compressed_attention import Sight, compressed_attention
from arbcli.kernels.attention.compressed_attention_backward import compressed_attention_backward
from arbcli.kernels.attention.rotation import rotate
from arbcli.kernels.attention.sum_choices import sum_choices
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.model.flow import Flow, Reading, project
from arbcli.model.initial import output_std
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.rotary import Angles, for_heads, rotary_table, rows_at
from arbcli.model.parts.base import CachedAttention
from arbcli.model.parts.compressed_state import CompressedState
from arbcli.model.state import Clock

SINK = 1.0
"""Logarithm of what a sink adds to a total, at the start."""
TINY = 1e-30
"""Least share that is divided by."""


class _Attend(Function):
    """Attention to entries; its shares and the choices have no gradient."""

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
        given = (*ctx.saved_tensors, ctx.sight, NORM_EPS)
        grad_x, *grads = compressed_attention_backward(grad_y.contiguous(), *given)
        of_recent, of_entries = (grad.to(grad_x.dtype) for grad in grads[:2])
        return grad_x, of_recent, of_entries, None, grads[2], None, None, None


class _Compress(Function):
    """Bytes and entries as they are attended to, and entries before they are rotated."""

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
        given = (grad_recent, grad_entries, *ctx.saved_tensors, ctx.heads, NORM_EPS)
        return *compress_blocks_backward(*given), None, None, None


class _KeysOfChoices(Function):
    """The keys of chosen entries, (B, N, k, width); those of none are some of others."""

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
_keys_of_choices = operator(_KeysOfChoices)


@operator
def choose_entries(q: Tensor, w: Tensor, k: Tensor, first: int, most: int, top_k: int) -> Tensor:
    """Choose the entries of the largest scores, as the kernel of this name does."""
    return choose_by_scores(q, w, k, first, most, top_k)


class Indexer(nn.Module):
    """Score entries for the groups of bytes that are to attend to some of them.

    Args:
        config: of the attention.
        site: where it stands.
    """

    fp8 = False
    """Whether many scores are products of eight bits: see `build_model`."""

    def __init__(self, config: CompressedAttentionConfig, site: Site) -> None:
        super().__init__()
        parts = layers_for(site)
        self.heads, self.width = config.index_heads, config.index_width
        self.top_k, self.norm_gain = config.top_k, site.norm_gain
        queries = self.heads * (self.width + 1)
        self.query = parts.linear(queries, site.dim, site, area="indexer")
        self.key = parts.linear(
            self.width, config.kv_heads * config.width(site), site, area="indexer"
        )

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Give the angles of so many positions, of which a half of a head turns by them."""
        return rotary_table(length, self.width, device, self.width // 2)

    def queries(
        self, x: Tensor, norm: nn.Module | None, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Make queries and weights of the bytes that complete entries.

        Args:
            x: (B, N, D) of the stream.
            norm: before it; None if it is normalised.
            angles: of their positions, (N, width / 2) each.

        Returns:
            (B, N, h, width) and (B, N, h) in the dtype of x.
        """
        if norm and self.norm_gain:  # whose gains are cut off, too
            with torch.no_grad():
                x, norm = norm(x), None
        q, w = self.query(x.detach(), norm).split((self.heads * self.width, self.heads), dim=-1)
        q = rotated(q.unflatten(-1, (self.heads, self.width)), for_heads(angles))
        return q, w * (self.heads * self.width) ** -0.5

    def keys(self, entries: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Make keys, (B, E, width), of entries (B, E, G, d) that are not yet rotated."""
        return rotated(self.key(entries.detach().flatten(2)), angles)

    def choose(
        self,
        q: Tensor,
        w: Tensor,
        keys: Tensor,
        first: int,
        most: int,
        *,
        in_eight_bits: bool = False,
    ) -> Tensor:
        """Choose entries: see `choose_entries`.

        Keys that a cache keeps `in_eight_bits` are rounded to e4m3, and so are they and queries
        where scores are products of eight bits. They are normalised, so that none is beyond e4m3.
        """
        q, w, keys = (part.detach() for part in (q, w, keys))
        if self.fp8:
            q, keys = q.to(E4M3), keys.to(E4M3)
        elif in_eight_bits:
            keys = keys.to(E4M3).to(q.dtype)
        return choose_entries(q, w, keys, first, most, self.top_k)

    def divergence(
        self,
        q: Tensor,
        w: Tensor,
        keys: Tensor,
        chosen: Tensor,
        shares: Tensor,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Compute (9), float32.

        Args:
            q: (B, N, h, width).
            w: (B, N, h).
            keys: (B, E, width).
            chosen: (B, N, k) int32.
            shares: (B, N, k) float32, of attention.
            valid: (B, N) bool, which groups there are; None is all of them.
        """
        chosen = chosen.contiguous()
        mine = _keys_of_choices(keys, chosen, keys.shape[1])
        dots = torch.einsum("bnhd,bnkd->bnhk", q, mine).relu()
        scores = (dots.float() * w.float()[..., None]).sum(dim=2)
        there = chosen >= 0
        learned = scores.masked_fill(~there, -torch.inf).log_softmax(dim=-1)
        learned = learned.masked_fill(~there, 0)
        wanted = shares / shares.sum(dim=-1, keepdim=True).clamp(min=TINY)
        distance = wanted * (wanted.clamp(min=TINY).log() - learned)
        distance = distance.sum(dim=-1)
        if valid is None:
            return distance.mean()
        return (distance * valid).sum() / valid.sum().clamp(min=1)


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """Normalise the last dimension, and turn it; in the dtype of x."""
    normal = functional.rms_norm(x.float(), x.shape[-1:], eps=NORM_EPS)
    return rotate(normal, *angles).to(x.dtype)


def takes_all(chosen: Tensor | None, number: int, sight: Sight) -> bool:
    """Return whether choices are of all entries: attention is that without any then, bit by bit."""
    return chosen is not None and chosen.shape[-1] >= number <= sight.most


class CompressedAttention(CachedAttention):
    """Causal self-attention to entries of several positions, and to the last positions."""

    name = "attention"
    rounds_queries = True

    def __init__(self, config: CompressedAttentionConfig, site: Site) -> None:
        super().__init__()
        parts = layers_for(site)
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.width(site)
        self.rotated, self.ratio = config.rotated(site), config.ratio
        self.sight = Sight(config.window, self.ratio, config.entries(site))
        self.inner, self.kv = self.heads * self.width, self.kv_heads * self.width
        projected = self.inner + config.vectors * self.kv
        self.projection = parts.linear(projected, site.dim, site, area="attention")
        self.beta = self.key_gain = None
        if config.pooling == "softmax":
            self.beta = parts.taps(self.kv, self.ratio, site, area="attention")
        if config.key_gain:
            self.key_gain = parts.vector([1.0] * self.width, site, area="attention")
        self.steps_fused = self.key_gain is None
        self.sink = parts.vector([SINK] * self.heads, site, area="attention")
        self.sub_norm = parts.norm(self.inner, site) if config.sub_norm else None
        self.output = parts.linear(
            site.dim, self.inner, site, area="attention", std=output_std(self.inner, site.depth)
        )
        self.indexer = Indexer(config, site) if config.top_k is not None else None

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        reading: Reading | None = None,
        state: CompressedState | None = None,
    ) -> Flow:
        """Mix every position of (B, T, D) with those before it: see `Part.forward`.

        The divergence of the indexer is a part of the loss `indexer`, where there is something to
        learn.
        """
        projected, x = project(self.projection, x, norm, added)
        batch, length, _ = x.shape
        q, rest = self._parted(projected)
        q = q.unflatten(-1, (self.heads, self.width))
        kept = state.clock.kept_in if state is not None else self.kept
        if kept.queries:
            (q,) = kept.round(q, rotated=self.rotated)
        if state is not None:
            y = state.attend(x, norm, q, *rest.split(self.kv, dim=-1))
            return Flow(x, self.output(y.reshape(batch, length, self.inner), self.sub_norm))
        table = self.table(length, x.device)
        recent, entries, still = self._compressed(rest, table)
        number = entries.shape[1]
        recent, entries = self.kept.round(recent, entries, rotated=self.rotated)
        chosen, found = None, None
        if self.indexer:
            found, chosen = self._choose(self.indexer, x, norm, still)
        sink, sight = self.sink(), self.sight
        some = None if takes_all(chosen, number, sight) else chosen
        y, _, shares = _attend(q, recent, entries, some, sink, *table, sight)
        losses = {}
        if self.indexer and found and chosen is not None and torch.is_grad_enabled():
            if some is None:
                with torch.no_grad():
                    shares = _attend(q, recent, entries, chosen, sink, *table, sight)[2]
            valid = reading.valid if reading else None
            if valid is not None:  # empty slots attend too: a group counts if it has none of them
                last = self.ratio * torch.arange(2, number + 2, device=x.device) - 2
                valid = valid[:, last.clamp(max=length - 1)]
            divergence = self.indexer.divergence(*found, chosen[:, 1:], shares[:, 1:], valid)
            losses["indexer"] = [divergence]
        return Flow(x, self.output(y.flatten(2), self.sub_norm), losses)

    def step(self, x: Tensor, state: CompressedState, *, whole: bool = True) -> Tensor:
        """Mix one position with those before it: see `Part.step`."""
        q, new = self._parted(self.projection.fused(x, normalise=True))
        beta = self.beta.prepared() if self.beta else state.no_beta
        assert beta is not None
        still = state.append(new.unflatten(-1, (3, self.kv_heads, -1)), beta)
        if self.indexer:
            query = self.indexer.query.fused(x, normalise=True)
            state.choose(query, self.indexer.key.fused(still.flatten(2), normalise=False))
        y = state.attend_one(q.unflatten(-1, (self.heads, -1)), self.sink.prepared())
        added, normalise = x if whole else None, self.sub_norm is not None
        return self.output.fused(y.flatten(2), normalise=normalise, added=added)

    def new_state(self, clock: Clock) -> CompressedState:
        """Make rings for the last positions and for entries."""
        return CompressedState(clock, self)

    def _parted(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Part what was projected into queries, (..., H d), and vectors, values and gates of keys.

        These are (..., 3 G d); the gates of a mean are zeros.
        """
        q, rest = projected.tensor_split((self.inner,), dim=-1)
        if self.beta is None:
            rest = functional.pad(rest, (0, self.kv))
        return q, rest

    def gate_bias(self, device: torch.device) -> Tensor:
        """Decode beta, (G d, m) float32; that of a mean is zeros."""
        if self.beta is None:
            return torch.zeros(self.kv, self.ratio, device=device)
        return self.beta()

    def _compressed(
        self, rest: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (2) to (4): bytes, entries, and these before they are rotated, (B, n, G, d)."""
        beta = self.gate_bias(rest.device)
        if self.key_gain is None:
            return _compress(rest, beta, *table, self.kv_heads)
        cos, sin = table
        flat = torch.ones_like(cos), torch.zeros_like(sin)
        recent, entries, still = _compress(rest, beta, *flat, self.kv_heads)
        here = for_heads(table)
        starts = rows_at(here, slice(0, entries.shape[1] * self.ratio, self.ratio))
        recent, entries = self.placed(recent, here), self.placed(entries, starts)
        return recent.to(rest.dtype), entries.to(rest.dtype), still

    def _choose(
        self, indexer: Indexer, x: Tensor, norm: nn.Module | None, still: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor] | None, Tensor]:
        """Choose entries for every group: what they were scored by, and (B, N, k) int32 choices."""
        (batch, length, _), number = x.shape, still.shape[1]
        if not number:
            return None, torch.empty(batch, 1, 0, dtype=torch.int32, device=x.device)
        table = indexer.table(length, x.device)
        ends = slice(self.ratio - 1, None, self.ratio)
        q, w = indexer.queries(x[:, ends], norm, rows_at(table, ends))
        k = indexer.keys(still, rows_at(table, slice(0, number * self.ratio, self.ratio)))
        with torch.no_grad():
            kept = self.kept.stored is not None
            chosen = indexer.choose(q, w, k, 1, self.sight.most, in_eight_bits=kept)
            # the bytes before the first entry see none
            chosen = functional.pad(chosen, (0, 0, 1, 0), value=-1)
        return (q, w, k), chosen

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Give the angles of so many positions."""
        return rotary_table(length, self.width, device, self.rotated)

    def in_place(self, recent: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Normalise and turn bytes, (B, T, G d), by the angles of their positions.

        Returns:
            (B, T, G, d).
        """
        x = recent.unflatten(-1, (self.kv_heads, -1)).float()
        normal = functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
        return self.placed(normal, for_heads(angles)).to(recent.dtype)

    def placed(self, x: Tensor, angles: Angles) -> Tensor:
        """Multiply normalised (..., d) by the gains, if there are any, and turn it: in float32."""
        if self.key_gain:
            x = x.float() * self.key_gain()
        return rotate(x, *angles)

    def compress(self, values: Tensor, gates: Tensor) -> Tensor:
        """Make entries of blocks, (B, E, m, G d) each: (B, E, G, d), normalised and not rotated."""
        share = torch.softmax(gates.float() + self.gate_bias(gates.device).T, dim=2)
        entries = (share * values.float()).sum(dim=2).unflatten(-1, (self.kv_heads, -1))
        return functional.rms_norm(entries, entries.shape[-1:], eps=NORM_EPS).to(values.dtype)

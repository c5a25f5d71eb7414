"""An outer stage: encoder, chunking, an inner network on the chunks, dechunking, decoder.

The equations are those of `arbcli.model.parts.chunking`.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.model import ModelConfig
from arbcli.kernels.chunks.boundary_scores import boundary_scores
from arbcli.kernels.chunks.find_chunks import find_chunks
from arbcli.kernels.chunks.route_position import route_position_, take_chunk_
from arbcli.kernels.chunks.smooth_chunks import smooth_chunks
from arbcli.kernels.chunks.spread_chunks import spread_chunks
from arbcli.kernels.runtime.conditions import has_conditions
from arbcli.model.flow import Flow, Reading, each_text, merge, project
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.mark import Written
from arbcli.model.parts.chunking import (
    BoundaryRouter,
    Routed,
    norm,
    ratio_loss,
    route_every,
    route_words,
    share_of,
    spread,
    take_chunks,
)
from arbcli.model.stack import Stack
from arbcli.model.state import Clock, KeptTexts, State, Track


class Chunked(NamedTuple):
    """The chunks that a stage made of a batch."""

    ratio: Tensor | None
    """Its ratio loss; None where nothing is learned."""
    counts: Tensor
    """(3,) int64: positions, chunks, and boundaries that found no slot."""
    first: Tensor
    """(B, C) int64, the byte that each chunk begins with; -1 for an empty slot."""


class Stage(nn.Module):
    """Everything around an inner network.

    Args:
        config: of the model.
        index: of the stage.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        own = config.stages[index]
        self.chunking, self.index, self.config = config.chunkings[index], index, config
        site = config.site(index, len(own.before))
        inner = config.site(index + 1)
        parts = layers_for(site)
        self.encoder = Stack(own.before, own, site)
        self.router = BoundaryRouter(site) if self.chunking.boundaries == "learned" else None
        self.inward = parts.linear(inner.dim, site.dim, site, area="chunking")
        self.outward_norm = parts.norm(inner.dim, inner)
        self.outward = parts.linear(site.dim, inner.dim, site, area="chunking")
        self.residual = parts.linear(site.dim, site.dim, site, spread=0.0, area="chunking")
        self.decoder = Stack(own.after, own, config.site(index, len(own.after)))

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        reading: Reading,
        inner: Callable[[Tensor, Reading], Flow],
        seen: list[Chunked],
        *,
        recompute: bool = False,
    ) -> Flow:
        """Pass (B, T, D) through the stage and all inside it.

        Args:
            x: the stream.
            ids: (B, bytes) int64, the text.
            reading: what is read besides.
            inner: the network inside, on chunks.
            seen: what the stages make of the batch is added to it.
            recompute: whether a backward computes what is inside a block again.
        """
        before = self.encoder(x, reading, recompute=recompute)
        x = norm(before.whole(), NORM_EPS)
        valid = reading.valid
        routed = self._route(x, ids)
        if valid is not None:
            routed = routed._replace(begins=routed.begins & valid)
        chunks = find_chunks(routed.begins, self.config.capacity(self.index, x.shape[1]))
        inside = reading.at(chunks.first)
        if inside.places is None:
            raise ValueError("chunks need the places of their positions")
        numel = torch.full_like(inside.places[0, 0], routed.begins.numel())
        counts = (
            numel if valid is None else valid.sum(),
            (chunks.first >= 0).sum(),
            chunks.overflow.sum(),
        )
        ratio = ratio_loss(routed, self.chunking.length, valid) if self.router else None
        seen.append(Chunked(ratio, torch.stack(counts), inside.places))
        within = inner(self.inward(take_chunks(x, chunks)), inside)
        z, _ = project(self.outward, within.x, self.outward_norm, within.added)
        x = spread(z, routed.p, self.residual(x), chunks)
        after = self.decoder(x, reading, recompute=recompute)
        return after._replace(losses=merge(before.losses, within.losses, after.losses))

    def _route(self, x: Tensor, ids: Tensor) -> Routed:
        if self.router:
            return self.router(x)
        if self.chunking.boundaries == "space":
            return route_words(ids, torch.full_like(ids[:, :1], -1))
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return route_every(self.chunking.length, positions)

    def new_state(self, ctx: int, texts: KeptTexts) -> "StageState":
        """Make the state of a text, or of several: see `Clock`."""
        tracks = (stack.new_track(ctx, texts) for stack in (self.encoder, self.decoder))
        return StageState(self, *tracks)

    def follow(
        self,
        x: Tensor,
        ids: Tensor,
        reading: Reading,
        past: "StageState",
        inner: Callable[[Tensor, Reading], Flow],
    ) -> Flow:
        """Do as `forward` does after a past, with (1, T, D); waits to know how many chunks begin.

        Args:
            x: the stream.
            ids: (1, bytes) int64, the bytes that are read.
            reading: what is read besides.
            past: is brought up to these positions.
            inner: the network inside, on the chunks that begin.
        """
        clock = past.encoder.clock
        first = clock.position.clone()
        past.decoder.position.copy_(first)
        with clock.reading(x.shape[1]):
            x = norm(self.encoder(x, reading, past.encoder).whole(), NORM_EPS)
        places = (first + torch.arange(x.shape[1], device=x.device))[None]
        if self.router:
            routed = past.route(x, self.router.query_key(x), places)
        elif self.chunking.boundaries == "space":
            before = torch.where(first == 0, -1, past.byte)
            routed = route_words(ids, before)
            past.byte.copy_(ids[:, -1:])
        else:
            routed = route_every(self.chunking.length, places)
        past.x, past.residual = x, self.residual(x)
        past.p, past.begins = routed
        if past.begins.any():
            chosen = torch.nonzero(past.begins[0])[:, 0][None]
            within = inner(self.inward(past.chosen()), reading.at(chosen))
            past.take_in(project(self.outward, within.x, self.outward_norm, within.added)[0])
        with past.decoder.clock.reading(x.shape[1]):
            return self.decoder(past.spread(), reading, past.decoder)

    def step_down(
        self, x: Tensor, ids: Tensor, reading: Reading, past: "StageState", *, fused: bool
    ) -> None:
        """Encode one position, ask whether it begins a chunk, and take it to be none.

        Positions are counted by the kernels that route, and by nothing else.
        """
        x = pass_one(self.encoder, x, past.encoder, reading, fused=fused)
        query_key = self.router.query_key if self.router else None
        if not fused:
            normal = norm(x, NORM_EPS)
            layers = (query_key, self.residual) if query_key else (self.residual,)
            rows = torch.cat([each_text(layer, normal) for layer in layers], dim=-1)
        elif query_key:
            rows = query_key.fused(x, normalise=True, also=self.residual, early=False)
        else:
            rows = self.residual.fused(x, normalise=True, early=False)
        past.begin(x, rows, ids)

    def step_inward(self, past: "StageState", *, fused: bool) -> Tensor:
        """Lead a position that begins a chunk to the inner network."""
        if fused:
            return self.inward.fused(past.x, normalise=True)
        return each_text(self.inward, norm(past.x, NORM_EPS))

    def step_outward(
        self, x: Tensor, past: "StageState", counted: Tensor | None, *, fused: bool
    ) -> None:
        """Lead out what the inner network gives for it, and take its chunk for the last one.

        Args:
            x: (B, 1, D) of the inner network.
            past: of this stage.
            counted: the inner network's position, to be counted; None if it counts itself.
            fused: whether products do what is around them.
        """
        if fused:
            z = self.outward.fused(x, normalise=True, early=False)
        else:
            z = each_text(lambda row: self.outward(row, self.outward_norm), x)
        past.take(z, counted)

    def step_up(self, reading: Reading, past: "StageState", *, fused: bool) -> Tensor:
        """Decode the position that `step_down` was given last."""
        x = pass_one(self.decoder, past.y, past.decoder, reading, fused=fused)
        if past.encoder.each:  # a mark reads it: of one text the next step sets it
            past.decoder.clock.count()
        return x


def pass_one(stack: Stack, x: Tensor, track: Track, reading: Reading, *, fused: bool) -> Tensor:
    """Pass one position of each text through blocks after their past; it is counted elsewhere."""
    with track.clock.reading_uncounted():
        if fused:
            return stack.step(x, track, reading)
        return stack(x, reading, track).whole()


class StageState(State):
    """The state of a stage, and the output of its encoder that the decoder reads.

    Args:
        stage: that it belongs to.
        encoder: states of its blocks.
        decoder: likewise.
    """

    by_text = ("last", "mean", "byte")

    x: Tensor
    """(1, T, D), the new positions, encoded; normalised if there are several. Of several texts it
    is one of each, (B, 1, D), here as below."""
    residual: Tensor
    """(1, T, D), what of them goes past the inner network."""
    p: Tensor
    """(1, T) float32, how likely chunks begin at them."""
    begins: Tensor
    """(1, T) bool, whether they do."""
    y: Tensor
    """(B, 1, D), what the decoder is given of a single one of each text."""
    inner: Clock
    """Of several texts: that of the stage inside, which is told whose positions begin chunks."""

    def __init__(self, stage: Stage, encoder: Track, decoder: Track) -> None:
        super().__init__(encoder.clock)
        self.chunking, self.encoder, self.decoder = stage.chunking, encoder, decoder
        clock, dim = encoder.clock, stage.config.stages[stage.index].dim
        decoder.clock.going_on = clock.going_on
        self.last = clock.zeros(2, dim)
        """The position before the new ones, encoded and normalised, and what is projected of it
        for the position after it."""
        self.mean = clock.zeros(dim, dtype=torch.float32)
        """The last chunk, smoothed."""
        self.byte = clock.zeros(1, 1, dtype=torch.int64)
        """The last byte."""
        conditional = has_conditions(clock.device) and clock.texts is None
        self.handle = torch.zeros_like(self.byte) if conditional else None
        """That of a conditional node, which is told whether a single position begins a chunk."""
        self._means: Tensor | None = None

    @cached_property
    def each(self) -> list["StageState"]:
        """The state of each of several texts, in the same tensors."""
        states = super().each
        for own, encoder, decoder in zip(states, self.encoder.each, self.decoder.each, strict=True):
            own.encoder, own.decoder = encoder, decoder
        return states

    @property
    def nbytes(self) -> int:
        """Bytes that the states of blocks take."""
        return self.encoder.nbytes + self.decoder.nbytes

    def reset(self) -> None:
        """Begin a new text."""
        self.encoder.reset()
        self.decoder.reset()
        self.mean.zero_()

    def written(self) -> Iterator[Written]:
        """List what a position writes besides the states of blocks."""
        read = self.byte if self.chunking.boundaries == "space" else self.last
        yield from map(Written, (self.mean, read))

    def begin(self, x: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Route a single position of each text: see `route_position_`."""
        texts, clock = self.clock.position.shape, self.clock
        self.p, self.begins, y = route_position_(
            self.chunking.boundaries, x.view(*texts, -1), rows.view(*texts, -1),
            self.mean.view(*texts, -1), self.last.view(*texts, -1), self.byte, ids.contiguous(),
            self.encoder.position, self.decoder.position, self.chunking.length, NORM_EPS,
            self.handle, clock.going_on,
        )  # fmt: skip
        self.x, self.y = x, y.view(x.shape)
        self.residual = rows[..., -x.shape[-1] :].contiguous()
        if texts and self.inner.going_on is not None:
            self.inner.going_on.copy_(self.begins[:, 0])

    def take(self, z: Tensor, counted: Tensor | None) -> None:
        """Take a single new chunk of each text: see `take_chunk_`."""
        texts = self.clock.position.shape
        z, residual, y = (part.view(*texts, -1) for part in (z, self.residual, self.y))
        begins = self.inner.going_on if texts else None
        take_chunk_(z, self.p, residual, self.mean, y, counted, begins)

    def route(self, x: Tensor, query_key: Tensor, places: Tensor) -> Routed:
        """Compare new positions (1, T, D) with those before them; `places` is where they are."""
        width = x.shape[-1]
        # of the position before only the query counts
        last_query_key = functional.pad(self.last[1], (0, width))
        before = (
            torch.cat((self.last[:1][None], x), dim=1),
            torch.cat((last_query_key[None, None], query_key), dim=1),
        )
        p = boundary_scores(*before)[:, 1:].masked_fill(places == 0, 1)
        self.last[0].copy_(x[0, -1])
        self.last[1].copy_(query_key[0, -1, :width])
        return Routed(p, p > 0.5)

    def chosen(self) -> Tensor:
        """Take the new positions that begin chunks, (1, n, D)."""
        return self.x[self.begins][None]

    def take_in(self, z: Tensor) -> None:
        """Smooth new chunks, (1, n, D) of what the inner network gives."""
        p = self.p[self.begins][None]
        share = torch.cat((torch.ones_like(p[:, :1]), share_of(p)), dim=1)
        self._means = smooth_chunks(torch.cat((self.mean[None, None], z.float()), dim=1), share)
        self.mean.copy_(self._means[0, -1])

    def spread(self) -> Tensor:
        """Give every new position its chunk, (1, T, D), and what went past the inner network."""
        means, self._means = self._means, None
        if means is None:
            means, owner = self.mean[None, None], torch.zeros_like(self.begins, dtype=torch.int64)
        else:
            owner = self.begins.cumsum(1)
        return spread_chunks(self.residual, means, owner)

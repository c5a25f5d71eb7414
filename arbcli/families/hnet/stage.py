"""An outer stage of H-Net: encoder, chunking, inner network on chunks, dechunking, decoder.

`arbcli.families.hnet.chunking` has the equations.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.model import ModelConfig
from arbcli.families.hnet import chunking
from arbcli.families.hnet.kernels.boundary_scores import boundary_scores
from arbcli.families.hnet.kernels.route_position import route_position_, take_chunk_
from arbcli.families.hnet.kernels.smooth_chunks import smooth_chunks
from arbcli.kernels.runtime.conditions import has_conditions
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS, unit_rms
from arbcli.model.packed_model import JoinedStatistics
from arbcli.model.parts.base import BlockInputs, BlockOutput, map_texts, merge_losses, project
from arbcli.model.stack import Stack, run_position
from arbcli.model.state import PositionCounter, State, StateSpec, Track


class Stage(nn.Module, JoinedStatistics):
    """An outer stage, which wraps an inner network.

    Args:
        config: configuration of the model.
        index: index of the stage, outermost first.
    """

    draws = ("encoder", "router", "inward", "outward_norm", "outward", "residual", "decoder")
    counts: Tensor | None = None
    """(3,) int64 of the last training batch: positions, chunks, boundaries that found no slot."""
    recorded: list[Tensor] | None = None
    """List that forwards append (B, C) int64 to: index of the first byte of each chunk, -1 for an
    empty slot; None for no list."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        stage = config.stages[index]
        self.chunking, self.index, self.config = config.chunkings[index], index, config
        outer = config.layer_spec(index, len(stage.before))
        spec, inner = self.chunking.part_spec(outer), config.layer_spec(index + 1)
        parts = layers_for(spec)
        self.encoder = Stack(stage.before, stage, outer)
        self.router = (
            chunking.BoundaryRouter(spec) if self.chunking.boundaries == "learned" else None
        )
        self.inward = parts.linear(inner.dim, spec.dim, spec, area="chunking")
        self.outward_norm = parts.norm(inner.dim, inner)
        self.outward = parts.linear(spec.dim, inner.dim, spec, area="chunking")
        self.residual = parts.linear(spec.dim, spec.dim, spec, spread=0.0, area="chunking")
        self.decoder = Stack(stage.after, stage, config.layer_spec(index, len(stage.after)))

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        inputs: BlockInputs,
        inner: Callable[[Tensor, BlockInputs], BlockOutput],
        *,
        recompute: bool = False,
    ) -> BlockOutput:
        """Run (B, T, D) through the stage and the inner network.

        Args:
            x: the stream.
            ids: (B, bytes) int64, the text.
            inputs: additional inputs.
            inner: the inner network, on chunks.
            recompute: whether to use activation checkpointing.
        """
        before = self.encoder(x, inputs, recompute=recompute)
        x = unit_rms(before.total())
        valid = inputs.valid
        routed = self._route(x, ids)
        if valid is not None:
            routed = routed._replace(begins=routed.begins & valid)
        chunks = chunking.find_chunks(routed.begins, self.config.capacity(self.index, x.shape[1]))
        inside = inputs.select_positions(chunks.first)
        if inside.position_ids is None:
            raise ValueError("chunks need the ids of their positions")
        numel = torch.full_like(inside.position_ids[0, 0], routed.begins.numel())
        counts = (
            numel if valid is None else valid.sum(),
            (chunks.first >= 0).sum(),
            chunks.overflow.sum(),
        )
        ratio = chunking.ratio_loss(routed, self.chunking.length, valid) if self.router else None
        if torch.is_grad_enabled():
            self.counts = torch.stack(counts)
        if self.recorded is not None:
            self.recorded.append(inside.position_ids)
        within = inner(self.inward(chunking.take_chunks(x, chunks)), inside)
        z, _ = project(self.outward, within.x, self.outward_norm, within.added)
        x = chunking.spread(z, routed.p, self.residual(x), chunks)
        after = self.decoder(x, inputs, recompute=recompute)
        losses = merge_losses(before.losses, within.losses, after.losses)
        if ratio is not None:
            losses["ratio"] = [sum(losses.get("ratio", ()), ratio)]
        return after._replace(losses=losses)

    def join(self, group: Any) -> None:
        """Take the counts of the last micro-batch, which one process has computed."""
        if self.counts is not None:
            self.counts = group.gather([self.counts])[-1]

    def gauges(self) -> dict[str, float]:
        """Return metrics of the chunks of the last training batch.

        Returns:
            chunk_length: mean length of a chunk in bytes; chunk_length_2 and so on, in positions of
                the stage around.
            joined: share of the boundaries without a slot, whose chunks were merged.
        """
        if self.counts is None:
            return {}
        positions, chunks, overflow = self.counts.tolist()
        name = f"chunk_length_{self.index + 1}" if self.index else "chunk_length"
        return {name: positions / chunks, "joined": overflow / (chunks + overflow)}

    def _route(self, x: Tensor, ids: Tensor) -> chunking.Routed:
        if self.router:
            return self.router(x)
        if self.chunking.boundaries == "space":
            return chunking.route_words(ids, torch.full_like(ids[:, :1], -1))
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return chunking.route_every(self.chunking.length, positions)

    def new_state(self, ctx: int, texts: StateSpec) -> "StageState":
        """Create the decoding state of a text, or of a batch of texts: see `PositionCounter`."""
        tracks = (stack.new_track(ctx, texts) for stack in (self.encoder, self.decoder))
        return StageState(self, *tracks)

    def follow(
        self,
        x: Tensor,
        ids: Tensor,
        inputs: BlockInputs,
        past: "StageState",
        inner: Callable[[Tensor, BlockInputs], BlockOutput],
    ) -> BlockOutput:
        """Run `forward` for new positions of a text, (1, T, D); synchronises to count the chunks.

        Args:
            x: the stream.
            ids: (1, bytes) int64, the new bytes.
            inputs: additional inputs.
            past: decoding state, updated in place.
            inner: the inner network, on the chunks that begin.
        """
        clock = past.encoder.clock
        first = clock.position.clone()
        past.decoder.position.copy_(first)
        with clock.reading(x.shape[1]):
            x = unit_rms(self.encoder(x, inputs, past.encoder).total())
        position_ids = (first + torch.arange(x.shape[1], device=x.device))[None]
        if self.router:
            routed = past.route(x, self.router.query_key(x), position_ids)
        elif self.chunking.boundaries == "space":
            routed = chunking.route_words(ids, torch.where(first == 0, -1, past.byte))
            past.byte.copy_(ids[:, -1:])
        else:
            routed = chunking.route_every(self.chunking.length, position_ids)
        past.x, past.residual = x, self.residual(x)
        past.p, past.begins = routed
        if past.begins.any():
            chosen = torch.nonzero(past.begins[0])[:, 0][None]
            within = inner(self.inward(past.chosen()), inputs.select_positions(chosen))
            past.take_in(project(self.outward, within.x, self.outward_norm, within.added)[0])
        with past.decoder.clock.reading(x.shape[1]):
            return self.decoder(past.spread(), inputs, past.decoder)

    def step_down(
        self, x: Tensor, ids: Tensor, inputs: BlockInputs, past: "StageState", *, fused: bool
    ) -> None:
        """Encode one position, decide whether it begins a chunk, and prepare the decoder input.

        The routing kernel increments the positions of encoder and decoder.

        Args:
            x: (B, 1, D), the stream.
            ids: (B, 1) int64, the byte of each text.
            inputs: additional inputs.
            past: decoding state of this stage, updated in place.
            fused: whether to use fused kernels.
        """
        x = run_position(self.encoder, x, past.encoder, inputs, fused=fused)
        query_key = self.router.query_key if self.router else None
        if not fused:
            normal = unit_rms(x)
            layers = (query_key, self.residual) if query_key else (self.residual,)
            rows = torch.cat([map_texts(layer, normal) for layer in layers], dim=-1)
        elif query_key:
            rows = query_key.fused(x, normalise=True, also=self.residual, early=False)
        else:
            rows = self.residual.fused(x, normalise=True, early=False)
        past.begin(x, rows, ids)

    def step_inward(self, past: "StageState", *, fused: bool) -> Tensor:
        """Project a position of each text that begins a chunk to the inner width: (B, 1, D')."""
        if fused:
            return self.inward.fused(past.x, normalise=True)
        return map_texts(self.inward, unit_rms(past.x))

    def step_outward(
        self, x: Tensor, past: "StageState", counted: Tensor | None, *, fused: bool
    ) -> None:
        """Project the inner network's output for a new chunk, and make that the current chunk.

        Args:
            x: (B, 1, D), output of the inner network.
            past: decoding state of this stage.
            counted: position counter of the inner network to increment; None if it does so itself.
            fused: whether to use fused kernels.
        """
        if fused:
            z = self.outward.fused(x, normalise=True, early=False)
        else:
            z = map_texts(lambda row: self.outward(row, self.outward_norm), x)
        past.take(z, counted)

    def step_up(self, inputs: BlockInputs, past: "StageState", *, fused: bool) -> Tensor:
        """Run the decoder for the position of the last `step_down`: (B, 1, D)."""
        x = run_position(self.decoder, past.y, past.decoder, inputs, fused=fused)
        # a mark reads the count; for a single text the next step sets it
        if past.encoder.text_views:
            past.decoder.clock.count()
        return x


class StageState(State):
    """The decoding state of a stage.

    Args:
        stage: the stage.
        encoder: states of the encoder's blocks.
        decoder: states of the decoder's blocks.
    """

    stored = ("last", "mean", "byte")

    x: Tensor
    """(1, T, D), the encoder's output for the new positions, normalised if T > 1. For a batch of
    texts its shape is (B, 1, D); the same holds for the tensors below."""
    residual: Tensor
    """(1, T, D), the residual path around the inner network."""
    p: Tensor
    """(1, T) float32, boundary probabilities."""
    begins: Tensor
    """(1, T) bool, whether each position begins a chunk."""
    y: Tensor
    """(B, 1, D), input of the decoder for a single position of each text."""
    inner: PositionCounter
    """Batches only: counter of the inner stage, which only steps texts that begin a chunk."""

    def __init__(self, stage: Stage, encoder: Track, decoder: Track) -> None:
        super().__init__(encoder.clock)
        self.chunking, self.encoder, self.decoder = stage.chunking, encoder, decoder
        clock, dim = encoder.clock, stage.config.stages[stage.index].dim
        decoder.clock.active = clock.active
        self.last = clock.zeros(2, dim)
        """(2, D), the last position: its normalised encoding, and its query for the next boundary.
        """
        self.mean = clock.zeros(dim, dtype=torch.float32)
        """(D,) float32, the smoothed value of the current chunk."""
        self.byte = clock.zeros(1, 1, dtype=torch.int64)
        """The last byte."""
        conditional = has_conditions(clock.device) and clock.texts is None
        self.handle = torch.zeros_like(self.byte) if conditional else None
        """Handle of a CUDA graph's conditional node that runs the inner network at a boundary."""
        self._means: Tensor | None = None

    @cached_property
    def text_views(self) -> list["StageState"]:
        """The state of each text of a batch, as views."""
        states = super().text_views
        stacks = zip(self.encoder.text_views, self.decoder.text_views, strict=True)
        for state, (encoder, decoder) in zip(states, stacks, strict=True):
            state.encoder, state.decoder = encoder, decoder
        return states

    @property
    def nbytes(self) -> int:
        """Memory of the states of blocks in bytes."""
        return self.encoder.nbytes + self.decoder.nbytes

    def reset(self) -> None:
        """Begin a new text."""
        self.encoder.reset()
        self.decoder.reset()
        self.mean.zero_()

    def begin(self, x: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Route a single position of each text: see `route_position_`."""
        texts, clock = self.clock.position.shape, self.clock
        self.p, self.begins, y = route_position_(
            self.chunking.boundaries, x.view(*texts, -1), rows.view(*texts, -1),
            self.mean.view(*texts, -1), self.last.view(*texts, -1), self.byte, ids.contiguous(),
            self.encoder.position, self.decoder.position, self.chunking.length, NORM_EPS,
            self.handle, clock.active,
        )  # fmt: skip
        self.x, self.y = x, y.view(x.shape)
        self.residual = rows[..., -x.shape[-1] :].contiguous()
        if texts and self.inner.active is not None:
            self.inner.active.copy_(self.begins[:, 0])

    def take(self, z: Tensor, counted: Tensor | None) -> None:
        """Make a new chunk of each text the current one: see `take_chunk_`."""
        texts = self.clock.position.shape
        z, residual, y = (part.view(*texts, -1) for part in (z, self.residual, self.y))
        begins = self.inner.active if texts else None
        take_chunk_(z, self.p, residual, self.mean, y, counted, begins)

    def route(self, x: Tensor, query_key: Tensor, position_ids: Tensor) -> chunking.Routed:
        """Compute the chunk boundaries among new positions x, (1, T, D), with ids (1, T)."""
        width = x.shape[-1]
        # only the query of the previous position is compared
        last_query_key = functional.pad(self.last[1], (0, width))
        before = (
            torch.cat((self.last[:1][None], x), dim=1),
            torch.cat((last_query_key[None, None], query_key), dim=1),
        )
        p = boundary_scores(*before)[:, 1:].masked_fill(position_ids == 0, 1)
        self.last[0].copy_(x[0, -1])
        self.last[1].copy_(query_key[0, -1, :width])
        return chunking.Routed(p, p > 0.5)

    def chosen(self) -> Tensor:
        """Return the new positions that begin chunks, (1, n, D)."""
        return self.x[self.begins][None]

    def take_in(self, z: Tensor) -> None:
        """Smooth the inner network's outputs for new chunks, (1, n, D)."""
        p = self.p[self.begins][None]
        share = torch.cat((torch.ones_like(p[:, :1]), chunking.share_of(p)), dim=1)
        self._means = smooth_chunks(torch.cat((self.mean[None, None], z.float()), dim=1), share)
        self.mean.copy_(self._means[0, -1])

    def spread(self) -> Tensor:
        """Return each new position's chunk plus its residual path, (1, T, D)."""
        means, self._means = self._means, None
        if means is None:
            means, owner = self.mean[None, None], torch.zeros_like(self.begins, dtype=torch.int64)
        else:
            owner = self.begins.cumsum(1)
        return chunking.spread_chunks(self.residual, means, owner)

"""`HNet`: outer blocks on bytes, which find chunks; a main network on these; and back to bytes."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arbcli.config.dense import VOCABULARY
from arbcli.config.hnet import HNetConfig
from arbcli.kernels.chunks.find_chunks import find_chunks
from arbcli.model.blocks.chunking import (
    Routed,
    Router,
    norm,
    ratio_loss,
    route_every,
    route_words,
    spread,
    take_chunks,
)
from arbcli.model.blocks.mamba import MambaBlock, MambaCache
from arbcli.model.cache import KeyValueCache
from arbcli.model.dense import Block, takes_one_position
from arbcli.model.hnet_cache import HNetCache
from arbcli.model.language_model import RECOMPUTE, LanguageModel, Phase
from arbcli.model.layers.kinds import byte_head, layers_for
from arbcli.model.layers.norm import NORM_EPS


class Stage(nn.Module):
    """Everything around an inner network: encoder, router, the ways in and out, decoder."""

    def __init__(self, config: HNetConfig, stage: int) -> None:
        super().__init__()
        own = self.config = config.outer(stage)
        inner = config.outer(stage + 1) if stage + 1 < config.stages else config.main()
        parts, about = layers_for(own), {"area": "chunking"}

        def blocks() -> nn.ModuleList:
            if config.outer_blocks == "mamba":
                return nn.ModuleList(MambaBlock(own, config.states) for _ in range(own.layers))
            return nn.ModuleList(Block(own, config.window) for _ in range(own.layers))

        self.encoder = blocks()
        self.router = Router(own) if config.boundaries == "learned" else None
        self.inward = parts.linear(inner.dim, own.dim, own, **about)
        self.outward_norm = parts.norm(inner.dim, inner)
        self.outward = parts.linear(own.dim, inner.dim, own, **about)
        self.residual = parts.linear(own.dim, own.dim, own, spread=0.0, **about)
        self.decoder = blocks()


class _Seen(NamedTuple):
    """What a stage made of a batch."""

    ratio: Tensor | None
    """Its ratio loss; None where nothing is learned."""
    counts: Tensor
    """(3,) int64: positions, chunks, and boundaries that found no slot."""


class HNet(LanguageModel):
    """A language model over bytes that works on chunks of them.

    Args:
        config: its shape and storage.
        compute_dtype: of activations; bfloat16, or float32.
        recompute: whether a backward computes what is inside a block again.
    """

    config: HNetConfig

    def __init__(
        self,
        config: HNetConfig,
        compute_dtype: torch.dtype = torch.bfloat16,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.recompute = config, compute_dtype, recompute
        outer, main = config.outer(0), config.main()
        parts = layers_for(outer)
        self.cross_entropy = parts.cross_entropy
        self.embedding = parts.embedding(VOCABULARY, outer.dim, outer, area="embedding")
        self.stages = nn.ModuleList(Stage(config, stage) for stage in range(config.stages))
        self.main_config = main
        self.blocks = nn.ModuleList(Block(main) for _ in range(main.layers))
        self.norm = parts.norm(outer.dim, outer)
        self.head = byte_head(outer)
        self._counts: Tensor | None = None

    def forward(self, ids: Tensor, cache: HNetCache | None = None) -> Tensor:
        """Compute (B, T, 256) logits, in `compute_dtype`, from (B, T) int64 bytes.

        With a cache B is 1: the bytes follow on those that it has seen, and are added to it.
        """
        if cache is None:
            return self._logits(ids)[0]
        x = self._follow(0, self.embedding(ids, self.compute_dtype), ids, cache)
        return self.head(x, self.norm)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Average the cross-entropy, in nats a byte, over (B, T) int64 inputs and targets."""
        return self.losses(ids, targets)["text"]

    def losses(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the parts of the loss: `text`, and `ratio` of all stages where it is learned."""
        logits, seen = self._logits(ids)
        if torch.is_grad_enabled():
            self._counts = torch.stack([stage.counts for stage in seen])
        losses = {"text": self.cross_entropy(logits.flatten(0, 1), targets.flatten())}
        ratios = [stage.ratio for stage in seen if stage.ratio is not None]
        return losses | ({"ratio": sum(ratios)} if ratios else {})

    def boundaries(self, ids: Tensor) -> list[Tensor]:
        """Find where chunks begin in (B, T) bytes: for each stage (B, T) bool, at bytes."""
        found: list[Tensor] = []
        with torch.no_grad():
            self._logits(ids, found)
        return found

    def _logits(self, ids: Tensor, found: list[Tensor] | None = None) -> tuple[Tensor, list[_Seen]]:
        """Compute logits, what the stages saw, and into `found` where their chunks begin."""
        seen: list[_Seen] = []
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self._through(0, self.embedding(ids, self.compute_dtype), ids, places, seen, found)
        return self.head(x, self.norm), seen

    def _through(
        self,
        index: int,
        x: Tensor,
        ids: Tensor,
        places: Tensor | None,
        seen: list[_Seen],
        found: list[Tensor] | None,
    ) -> Tensor:
        """Pass (B, T, D) through a stage and all inside it.

        Args:
            index: of the stage; that behind the last is the main network.
            x: the stream.
            ids: the bytes of the text.
            places: (B, T) int64, the bytes that positions stand for; -1 is no position.
            seen: what stages see is added to it.
            found: where their chunks begin is.
        """
        if index == len(self.stages):
            return self._run(self.blocks, x)
        stage, config = self.stages[index], self.config
        x = self._run(stage.encoder, x)
        x = norm(x, NORM_EPS)
        valid = places >= 0 if index else None
        routed = self._route(stage, index, x, ids)
        if valid is not None:
            routed = routed._replace(begins=routed.begins & valid)
        chunks = find_chunks(routed.begins, config.capacity(index, x.shape[1]))
        begun = places.gather(1, chunks.first.clamp(min=0))
        begun = begun.masked_fill(chunks.first < 0, -1)
        positions = valid.sum() if index else torch.full_like(begun[0, 0], places.numel())
        counts = positions, (chunks.first >= 0).sum(), chunks.overflow.sum()
        ratio = ratio_loss(routed, config.chunk_length[index], valid) if stage.router else None
        seen.append(_Seen(ratio, torch.stack(counts)))
        if found is not None:
            marks = torch.zeros_like(ids, dtype=torch.bool)
            # slots without a chunk mark the first byte, which begins one anyway
            found.append(marks.scatter_(1, begun.clamp(min=0), True))
        z = stage.inward(take_chunks(x, chunks))
        z = self._through(index + 1, z, ids, begun, seen, found)
        z = stage.outward(z, stage.outward_norm)
        return self._run(stage.decoder, spread(z, routed.p, stage.residual(x), chunks))

    def _route(self, stage: Stage, index: int, x: Tensor, ids: Tensor) -> Routed:
        if stage.router:
            return stage.router(x)
        if self.config.boundaries == "space":
            return route_words(ids, torch.full_like(ids[:, :1], -1))
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return route_every(self.config.chunk_length[index], positions)

    def _run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        recompute = self.recompute and torch.is_grad_enabled()
        for block in blocks:
            x = checkpoint(block, x, **RECOMPUTE) if recompute else block(x)
        return x

    def join(self, group: Any) -> None:
        """Take the counts of the last micro-batch, which one process has seen."""
        self._counts = group.in_order([self._counts])[-1]

    def gauges(self) -> dict[str, float]:
        """Measure the chunks of the last step; waits for the device.

        Returns:
            chunk_length: bytes of a chunk on average; chunk_length_2 and so on, positions of a
                chunk of the stages inside.
            joined: share of the boundaries that found no slot, so that chunks were joined.
        """
        if self._counts is None:
            return {}
        found, joined, begun = {}, 0, 0
        for index, (positions, chunks, overflow) in enumerate(self._counts.tolist()):
            found[f"chunk_length_{index + 1}" if index else "chunk_length"] = positions / chunks
            joined, begun = joined + overflow, begun + chunks + overflow
        return found | {"joined": joined / begun}

    def new_cache(self, positions: int) -> HNetCache:
        """Make a cache for a text of at most `positions` bytes; no gradient passes through it."""
        about = (self.config, positions, self.compute_dtype, self.device)
        return HNetCache(*about, stored=self.stored)

    def step_phases(self, ids: Tensor, cache: HNetCache) -> list[Phase]:
        """List what reading one byte takes; a byte that begins no chunk needs but the outer ones.

        Args:
            ids: (1, 1) int64, read anew in every step.
            cache: read and written in place.
        """
        last = len(self.stages)

        def down(index: int) -> None:
            if index == 0:
                x = self.embedding(ids, self.compute_dtype)
            else:
                x = self._inward(index - 1, cache)
            self._step_down(index, x, ids, cache)

        def main() -> None:
            x = self._inward(last - 1, cache)
            x = self._step_through(self.blocks, x, cache.main)
            self._outward(last - 1, x, cache)

        def up(index: int) -> Tensor | None:
            past = cache.stages[index]
            x = self._step_through(self.stages[index].decoder, past.y, past.decoder)
            if index:
                return self._outward(index - 1, x, cache)
            if self._fuses(x):
                return self.head.fused(x, normalise=True)
            return self.head(x, self.norm)

        phases = []
        for index, past in enumerate(cache.stages):
            begins = partial(getattr, past, "begins")
            phases.append(Phase(index, partial(down, index), begins, past.handle))
        phases.append(Phase(last, main))
        return phases + [Phase(index, partial(up, index)) for index in reversed(range(last))]

    def _fuses(self, x: Tensor) -> bool:
        """Whether steps multiply in kernels that do what is around the products, too."""
        configs = (self.main_config, *(stage.config for stage in self.stages))
        return all(takes_one_position(self, x, config) for config in configs)

    def _step_down(self, index: int, x: Tensor, ids: Tensor, cache: HNetCache) -> None:
        """Encode a position, ask whether it begins a chunk, and take it to be none."""
        stage, past = self.stages[index], cache.stages[index]
        x = self._step_through(stage.encoder, x, past.encoder)
        before = stage.router.query_key if stage.router else None
        if not self._fuses(x):
            normal = norm(x, NORM_EPS)
            layers = (before, stage.residual) if before else (stage.residual,)
            rows = torch.cat([layer(normal) for layer in layers], dim=-1)
        elif before:
            rows = before.fused(x, normalise=True, beside=stage.residual, early=False)
        else:
            rows = stage.residual.fused(x, normalise=True, early=False)
        past.begin(self.config.boundaries, x, rows, ids, self.config.chunk_length[index])

    def _inward(self, index: int, cache: HNetCache) -> Tensor:
        """Lead a position that begins a chunk to the inner network."""
        inward, x = self.stages[index].inward, cache.stages[index].x
        return inward.fused(x, normalise=True) if self._fuses(x) else inward(norm(x, NORM_EPS))

    def _outward(self, index: int, x: Tensor, cache: HNetCache) -> None:
        """Lead out what the inner network gives for it, and take its chunk for the last one."""
        stage = self.stages[index]
        if self._fuses(x):
            z = stage.outward.fused(x, normalise=True, early=False)
        else:
            z = stage.outward(x, stage.outward_norm)
        # stages count their positions themselves
        counted = cache.main.position if index + 1 == len(self.stages) else None
        cache.stages[index].take(z, counted)

    def _step_through(
        self, blocks: nn.ModuleList, x: Tensor, past: KeyValueCache | MambaCache
    ) -> Tensor:
        """Pass a position through blocks, after their past; it is counted elsewhere."""
        pairs = zip(blocks, past.blocks, strict=True)
        if self._fuses(x):
            for block, of_block in pairs:
                x = block.one_position(x, of_block)
            return x
        added = None
        for block, of_block in pairs:
            x, added = block.follow(x, added, of_block)
        return x + added

    def _follow(self, index: int, x: Tensor, ids: Tensor, cache: HNetCache) -> Tensor:
        """Do as `_through` does, after a past; waits for the device to know how many chunks."""
        if index == len(self.stages):
            return self._run_after(self.blocks, x, cache.main)
        stage, past = self.stages[index], cache.stages[index]
        self._down(index, x, ids, cache)
        if past.begins.any():
            z = self._follow(index + 1, stage.inward(past.chosen()), ids, cache)
            past.take_in(stage.outward(z, stage.outward_norm))
        return self._up(index, cache)

    def _down(self, index: int, x: Tensor, ids: Tensor, cache: HNetCache) -> None:
        """Encode new positions (1, T, D), and find which of them begin chunks."""
        stage, past = self.stages[index], cache.stages[index]
        first = past.encoder.position.clone()
        past.decoder.position.copy_(first)
        x = norm(self._run_after(stage.encoder, x, past.encoder), NORM_EPS)
        places = (first + torch.arange(x.shape[1], device=x.device))[None]
        if stage.router:
            routed = past.route(x, stage.router.query_key(x), places)
        elif self.config.boundaries == "space":
            before = torch.where(first == 0, -1, past.byte)
            routed = route_words(ids, before)
            past.byte.copy_(ids[:, -1:])
        else:
            routed = route_every(self.config.chunk_length[index], places)
        past.x, past.residual = x, stage.residual(x)
        past.p, past.begins = routed

    def _up(self, index: int, cache: HNetCache) -> Tensor:
        """Decode the positions that `_down` was given last."""
        stage, past = self.stages[index], cache.stages[index]
        return self._run_after(stage.decoder, past.spread(), past.decoder)

    def _run_after(
        self, blocks: nn.ModuleList, x: Tensor, past: KeyValueCache | MambaCache
    ) -> Tensor:
        """Pass new positions (1, T, D) through blocks, after their past."""
        added = None
        with past.reading(x.shape[1]):
            for block, of_block in zip(blocks, past.blocks, strict=True):
                x, added = block.follow(x, added, of_block)
        return x + added

"""Models put together at random from all parts agree with the reference, in every gradient."""

import random
from dataclasses import replace

import pytest
import torch
from cells import CHANNELS, MIXERS, PARTS
from marks import mostly_slow

from arbcli.config.model import BlockConfig, Blocks, ModelConfig, StageConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.experts.config import GATES
from arbcli.families.graph.config import MemoriesConfig
from arbcli.families.hnet.config import BOUNDARIES, ChunkingConfig
from arbcli.verify import parity
from arbcli.verify.models import MODELS
from arbcli.verify.subjects import Subject

BESIDE = MODELS["graph"].beside
BOOKS = [MODELS[name].main.memories for name in ("graph", "graph nearest")]


class Draw(random.Random):
    """Draws models."""

    def some(self, part, share=0.4):
        """Draw a part or None."""
        return part if self.random() < share else None

    def part(self, names: list[str]) -> PartConfig:
        part = PARTS[self.choice(names)]
        if part.kind == "experts":
            return replace(part, gate=self.choice(GATES), shared=self.random() < 0.5)
        if part.kind == "compressed":
            pooling, top_k = self.choice(["softmax", "mean"]), self.choice([None, 2])
            return replace(part, pooling=pooling, top_k=top_k, key_gain=self.random() < 0.3)
        return part

    def blocks(self) -> Blocks:
        """Draw up to three blocks."""
        drawn = [
            (self.some(self.part(MIXERS), 0.8), self.some(self.part(CHANNELS), 0.8))
            for _ in range(self.randint(0, 3))
        ]
        return tuple(BlockConfig(mixer=one, channel=two) for one, two in drawn if one or two)

    def stage(self, dim: int, **parts) -> StageConfig:
        contribution, bound = self.choice([1.0, 0.5]), self.choice([None, 1.5])
        return StageConfig(dim=dim, contribution=contribution, bound=bound, **parts)

    def outer(self, *, inside: bool) -> StageConfig:
        boundaries = self.choice([one for one in BOUNDARIES if not (inside and one == "space")])
        chunking = ChunkingConfig(boundaries=boundaries, length=self.choice([2, 3]))
        before, after, streams = self.blocks(), self.blocks(), self.choice([1, 2])
        return self.stage(20, streams=streams, before=before, after=after, chunking=chunking)

    def memories(self, blocks: int) -> MemoriesConfig | None:
        codebook, knowledge = self.choice(BOOKS).codebook, self.choice(BOOKS).knowledge
        memories = {"codebook": self.some(codebook), "knowledge": self.some(knowledge)}
        whole = BOOKS[0].iterated
        edges = self.some(whole.edges) if memories["codebook"] else None
        iterated = replace(whole, experts=self.some(whole.experts), edges=edges)
        memories["iterated"] = self.some(iterated)
        if not any(memories.values()):
            return None
        return MemoriesConfig(place=self.randint(0, blocks), **memories)

    def model(self) -> ModelConfig:
        blocks, depth = self.blocks(), self.choice([0, 0, 1, 2])
        plain = depth == 0 and self.random() < 0.6
        others = {"streams": self.choice([1, 2, 4])}
        if plain:
            others = {"memories": self.memories(len(blocks)), "router": self.random() < 0.4}
        outer = [self.outer(inside=index > 0) for index in range(depth)]
        return ModelConfig(
            ctx=self.choice([12, 16]),
            stages=(*outer, self.stage(24, blocks=blocks, **others)),
            beside=tuple(filter(self.some, BESIDE)),
            head=self.some(MLPConfig(width=13)),
            ahead=self.some(AheadConfig(positions=3, width=14)),
            norm_gain=self.random() < 0.3,
            digits=self.choice(["trit", "all"]),
            tied=self.random() < 0.3,
        )


@pytest.mark.parametrize("seed", mostly_slow(range(40), lambda seed: seed < 3))
def test_random_model_agrees_with_the_reference_in_every_gradient(seed, device):
    config, backend = Draw(seed).model(), "triton" if device.type == "cuda" else "torch"
    tested = Subject(f"seed {seed}", config, 2, torch.float32, device, backend, ("blocks", "whole"))
    results = parity.check_model(tested)
    assert not [result for result in results if not result.passed]
    compared = {result.item for result in results if result.check == "whole gradient"}
    weights = tested.build().weights().items()
    assert compared == {name for name, weight in weights if not weight.frozen}

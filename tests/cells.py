"""A small model for every mixer with every channel mixer, on streams, around chunks and on them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import pytest

from arbcli.config import kinds
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.families.mamba.config import MambaConfig

PARTS: dict[str, PartConfig] = {
    "attention": AttentionConfig(heads=2, window=5),
    "grouped": AttentionConfig(heads=4, kv_heads=2, head_width=8, window=6,
        rotary=RotaryConfig(base=50.0, share=0.5, scaling="llama3", factor=8.0, original_ctx=40),
        query_key_norm="gain", bias=True, output_bias=True, sink=True),
    "latent": LatentAttentionConfig(heads=2, latent=10, rotary=4),
    "compressed": CompressedAttentionConfig(heads=2, head_width=8, ratio=2, top_k=2, window=3,
        index_heads=2, index_width=8),
    "mamba": MambaConfig(heads=2, states=7), "mlp": MLPConfig(width=13),
    "experts": ExpertsConfig(experts=4, width=7, gate="softplus", shared=True),
}  # fmt: skip
"""Configurations by kind; `grouped` is `attention` of a shape without kernels."""
MIXERS = [name for name, part in PARTS.items() if part.kind in kinds.MIXERS]
CHANNELS = [name for name, part in PARTS.items() if part.kind in kinds.CHANNELS]


class Cell(NamedTuple):
    """A combination of what a model can be made of."""

    mixer: str
    """A name of `PARTS`, or `none`."""
    channel: str
    streams: int
    place: str
    """`plain`, `chunked`, or `ahead`: with a head beyond the next byte."""

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(mixer=PARTS.get(self.mixer), channel=PARTS.get(self.channel))

    def model(self) -> ModelConfig:
        """Assemble two of the blocks, or one of them before, on and after chunks.

        The last one chooses experts by a hash, if there are any.
        """
        block = last = self.block
        if self.channel == "experts":
            last = replace(block, channel=replace(block.channel, gate="hash", shared=False))
        main = StageConfig(dim=24, streams=self.streams, blocks=(block, last))
        gains = {"norm_gain": self.mixer == "grouped"}
        if self.place != "chunked":
            ahead = AheadConfig(positions=4, width=14) if self.place == "ahead" else None
            return ModelConfig(ctx=11, stages=(main,), ahead=ahead, **gains)
        outer = StageConfig(
            dim=20,
            streams=self.streams,
            before=(block,),
            after=(last,),
            chunking=ChunkingConfig(length=2),
        )
        return ModelConfig(ctx=14, stages=(outer, replace(main, blocks=(last,))), **gains)


def wide(config: ModelConfig) -> ModelConfig:
    """Give the outer stage of a cell a width that kernels of a row read."""
    if not config.outer:
        return config
    outer, main = config.stages
    return replace(config, stages=(replace(outer, dim=16), main))


def drop_part(config: ModelConfig, part: str) -> ModelConfig:
    """Leave the `mixer` or the `channel` out of all blocks, and blocks that have nothing else."""

    def left(blocks: tuple[BlockConfig, ...]) -> tuple[BlockConfig, ...]:
        other = {"mixer": "channel", "channel": "mixer"}[part]
        return tuple(replace(block, **{part: None}) for block in blocks if getattr(block, other))

    names = ("blocks", "before", "after")
    stages = [
        replace(stage, **{name: left(getattr(stage, name)) for name in names})
        for stage in config.stages
    ]
    return replace(config, stages=tuple(stages))


CELLS = [
    Cell(*cell)
    for cell in product((*MIXERS, "none"), (*CHANNELS, "none"), (1, 4), ("plain", "chunked"))
    if cell[:2] != ("none", "none")
]


AHEAD = Cell("attention", "mlp", 1, "ahead")


def pairs(cell: Cell) -> set:
    """List the choices of a cell two by two."""
    return set(combinations(enumerate(cell), 2))


def singles(cell: Cell) -> set:
    """List the choices of a cell one by one."""
    return set(enumerate(cell))


def covering(cells: list[Cell], of: Callable[[Cell], set]) -> list[Cell]:
    """Choose cells that have all choices among them, those with most new ones first.

    Args:
        of: lists what must be among them, such as `pairs` of choices, or `singles`.
    """
    left, chosen = set().union(*map(of, cells)), []
    while left:
        chosen.append(max(cells, key=lambda cell: len(left & of(cell))))
        left -= of(chosen[-1])
    return chosen


QUICK = covering(CELLS, pairs)
FEW = covering(CELLS, singles)
"""Every part in one cell at least, where a cell takes seconds."""
COVER = [*dict.fromkeys((*QUICK, *FEW))]


def each_cell(cells: list[Cell] = COVER, quick: list[Cell] = QUICK) -> pytest.MarkDecorator:
    """Run a test for cells that have every pair of choices; all but the `quick` ones are slow."""
    return pytest.mark.parametrize(
        "cell",
        [
            pytest.param(
                cell, id="-".join(map(str, cell)), marks=() if cell in quick else pytest.mark.slow
            )
            for cell in cells
        ],
    )

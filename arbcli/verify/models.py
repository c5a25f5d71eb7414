"""Models that are compared with their references: small ones of all parts, and the presets."""

from dataclasses import replace
from typing import Any

import torch

from arbcli.config.model import LISTS, BlockConfig, Blocks, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.config.presets import PRESETS, preset
from arbcli.config.short_forms import dense
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.compressed.presets import compressed
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.graph.presets import graph
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.families.hnet.presets import hnet
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.families.mamba.config import MambaConfig
from arbcli.families.media.config import CompositeConfig
from arbcli.model.build import build_model

RAGGED = dense(dim=36, layers=2, heads=2, ffn=50, ctx=6)
"""A model whose sizes 5, 32 and 160 do not divide, small enough for the interpreter."""
ONE_BLOCK = dense(dim=36, layers=1, heads=2, ffn=50, ctx=11)
GRAPH: dict[str, Any] = {
    "dim": 24, "layers": 2, "heads": 2, "ffn": 13, "ctx": 6, "latent": 10, "rotary": 4,
    "ngram_rows": 61, "ngram_dim": 11, "key_dim": 4, "codes": (5, 7), "code_dim": 17,
    "code_heads": 2, "knowledge": (6, 4), "knowledge_dim": 7, "knowledge_heads": 3, "top_k": 3,
    "experts": 3, "expert_dim": 7, "expert_ffn": 5, "gate_dim": 5, "adapter_rank": 3,
    "edges": (17, 2), "head_ffn": 11, "memory_rows": 59, "max_moe_iters": 2, "memgram": True,
}  # fmt: skip
"""All parts of an `arb` preset; a context has a 6-gram, which can be recalled."""
HNET: dict[str, Any] = {
    "dim": 24, "layers": 2, "heads": 2, "ffn": 13, "ctx": 17, "outer_dim": 20, "outer_layers": 1,
    "outer_heads": 2, "outer_ffn": 11, "chunk_length": 4, "window": 5,
}  # fmt: skip
TWO_STAGES = HNET | {
    "outer_dim": (20, 28), "outer_layers": (1, 1), "outer_heads": (2, 1), "outer_ffn": (11, 9),
    "chunk_length": (4, 2),
}  # fmt: skip
"""A model of which one text has too many chunks for its slots, and one too few."""
COMPRESSED: dict[str, Any] = {
    "dim": 24, "layers": 3, "heads": 4, "ffn": 13, "ctx": 19, "head_width": 10, "kv_heads": 2,
    "rotary": 6, "window": 5, "ratios": (3, 7), "indexed_ratio": 3, "top_k": 2, "index_heads": 3,
    "index_width": 8,
}  # fmt: skip
"""A model with incomplete groups and windows, which does not choose all entries."""


def mixed() -> ModelConfig:
    """Assemble blocks of several kinds, on several streams, around chunks and on them."""
    wide, mlp = AttentionConfig(heads=2), MLPConfig(width=13)
    near = CompressedAttentionConfig(heads=2, ratio=2, top_k=2, window=3, index_width=8)
    chosen = ExpertsConfig(experts=3, width=7, gate="softplus", shared=True, clamp=True)
    hashed = ExpertsConfig(experts=4, width=5, gate="hash")
    state_space = BlockConfig(mixer=MambaConfig(heads=2, states=7))
    outer = StageConfig(
        dim=20,
        streams=2,
        before=(state_space, BlockConfig(mixer=replace(wide, window=5), channel=hashed)),
        after=(BlockConfig(channel=mlp), state_space),
        chunking=ChunkingConfig(length=4),
    )
    inner = StageConfig(
        dim=24,
        streams=4,
        blocks=(
            BlockConfig(mixer=near, channel=chosen),
            BlockConfig(mixer=wide),
            BlockConfig(mixer=wide, channel=hashed),
        ),
    )
    return ModelConfig(ctx=17, stages=(outer, inner))


def bounded() -> ModelConfig:
    """Assemble blocks with scaled contributions, on bounded streams, one and several.

    Some positions are within the bound. If all were beyond it, lengths of streams would not matter,
    and gradients of write weights would be differences that bfloat16 rounds away.
    """
    block = BlockConfig(mixer=AttentionConfig(heads=2), channel=MLPConfig(width=13))
    outer = StageConfig(
        dim=20,
        bound=2.0,
        contribution=0.5,
        before=(block,),
        after=(block,),
        chunking=ChunkingConfig(length=3),
    )
    inner = StageConfig(dim=24, streams=2, contribution=0.75, bound=0.7, blocks=(block, block))
    return ModelConfig(ctx=11, stages=(outer, inner))


def grouped() -> ModelConfig:
    """Assemble blocks of attention with all features that have no kernels."""
    longer = RotaryConfig(base=50.0, share=0.5, scaling="llama3", factor=8.0, original_ctx=40)
    attention = AttentionConfig(
        heads=4,
        kv_heads=2,
        head_width=12,
        rotary=longer,
        query_key_norm="gain",
        bias=True,
        output_bias=True,
        sink=True,
    )
    sharpened = replace(longer, share=1.0, scaling="yarn")
    near = AttentionConfig(heads=4, window=5, rotary=sharpened, query_key_norm="none")
    channel = MLPConfig(width=13)
    blocks = tuple(BlockConfig(mixer=mixer, channel=channel) for mixer in (attention, near))
    return ModelConfig(ctx=11, stages=(StageConfig(dim=24, blocks=blocks),), norm_gain=True)


def masked() -> ModelConfig:
    """Assemble attention to both sides: to all, in a window, with sinks, and latent."""
    wide, longer = AttentionConfig(heads=2), grouped().main.blocks[0].mixer
    latent = LatentAttentionConfig(heads=2, latent=10, rotary=4)
    assert isinstance(longer, AttentionConfig)
    mixers = wide, replace(wide, window=5), replace(longer, window=4), latent
    blocks = tuple(BlockConfig(mixer=mixer, channel=MLPConfig(width=13)) for mixer in mixers)
    return ModelConfig(ctx=11, stages=(StageConfig(dim=24, blocks=blocks),), objective="masked")


MODELS = {
    "graph": graph(**GRAPH),
    "graph softplus": graph(**GRAPH, moe_gate="softplus", shared_expert=True, moe_clamp=True),
    "graph hash": graph(**GRAPH, moe_gate="hash"),
    "graph nearest": graph(**GRAPH, code_search="nearest"),
    "hnet": hnet(**TWO_STAGES),
    "hnet words": hnet(**HNET | {"chunk_length": 8}, boundaries="space"),
    "hnet every": hnet(**TWO_STAGES, boundaries="every"),
    "hnet mamba": hnet(**HNET | {"chunk_length": 5}, outer_blocks="mamba", states=7),
    "compressed": compressed(**COMPRESSED),
    "compressed of all": compressed(**COMPRESSED | {"top_k": 99}),
    "4 streams": dense(dim=36, layers=2, heads=2, ffn=50, ctx=6, streams=4),
    "2 streams": dense(dim=36, layers=2, heads=2, ffn=50, ctx=6, streams=2, digits="all"),
    "mixed": mixed(),
    "bounded": bounded(),
    "grouped": grouped(),
    "masked": masked(),
    "fill": replace(ONE_BLOCK, objective="fill"),
    "composite": replace(ONE_BLOCK, composite=CompositeConfig()),
    "ahead": replace(ONE_BLOCK, ahead=AheadConfig(positions=4, width=13)),
}
"""Small models, which together have all parts, compared from the bytes on."""
FULL_SIZE = {name: preset(name) for name in PRESETS} | {
    "arb-tiny with all parts": preset("arb-tiny", moe=True, graph=True, memgram=True)
}
"""Models that are also compared on a GPU, at their full width."""
LARGEST = ("1b", "arb-deep", "arb-tiny with all parts", "hnet-two-stage")
"""One of each family, which a GPU compares in bf16, as it is trained."""
BYTES_OF_REFERENCE = 48
"""Memory per weight: weight and gradient in float64, the kernels' gradient, and temporaries."""
LAYERS = 2
"""Number of blocks of a list that are compared at full size, besides later ones of other kinds."""
LONGEST, SHORTEST = 512, 8
"""Maximum contexts at full size, the shorter one for models that score all rows of a codebook."""


def has_mamba(config: ModelConfig) -> bool:
    """Return whether a model has Mamba blocks.

    In bf16 they are not compared: their gated outputs are normalised, and if one is nearly 0, it is
    mostly rounding error.
    """
    return any(part.kind == "mamba" for _, part in config.specs_and_parts())


def shortened(config: ModelConfig) -> ModelConfig:
    """Shorten a model, whose reference is slow, to a few blocks of each kind."""
    stages = []
    for stage in config.stages:
        memories = stage.memories
        if memories:
            place = sum(index < memories.place for index, _ in _kept(stage.blocks))
            memories = replace(memories, place=place)
        lists: dict[str, Any] = {
            name: tuple(block for _, block in _kept(getattr(stage, name))) for name in LISTS
        }
        stages.append(replace(stage, memories=memories, **lists))
    longest = SHORTEST if config.main.memories else LONGEST
    return replace(config, ctx=min(config.ctx, longest), stages=tuple(stages))


def _kept(blocks: Blocks) -> list[tuple[int, BlockConfig]]:
    """Select the first blocks of a list, and later ones of other kinds, with their indices."""
    return [
        (index, block)
        for index, block in enumerate(blocks)
        if index < LAYERS or block not in blocks[:index]
    ]


def fits(config: ModelConfig, device: torch.device) -> bool:
    """Return whether a GPU has memory for the reference of a model, next to that of another one."""
    with torch.device("meta"):
        model = build_model(config)
    memory = torch.cuda.get_device_properties(device).total_memory
    return 2 * BYTES_OF_REFERENCE * model.num_weights < memory

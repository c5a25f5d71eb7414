"""Presets with stages of chunks."""

from typing import Annotated, Any

from arbcli.base.errors import setting_error
from arbcli.config.model import (
    MAX_BLOCKS,
    MAX_OUTER_STAGES,
    BlockConfig,
    Context,
    ModelConfig,
    StageConfig,
)
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.settings import HNET, PRESETS_OWN, Setting
from arbcli.config.short_forms import FFN, Dim, Form, Heads, Layers, Streams, SubNorms, Window
from arbcli.families.hnet.config import BOUNDARIES, ChunkingConfig
from arbcli.families.mamba.config import MambaConfig

OUTER_BLOCKS = ("attention", "mamba")
"""Blocks of encoders and decoders: windowed attention with an MLP, or Mamba-2."""
STAGE_SETTINGS = ("outer_dim", "outer_layers", "outer_heads", "outer_ffn", "chunk_length")
"""Arguments with a number for each stage, the outermost first."""


_CHUNK_LENGTH = Setting(
    "Average length of a chunk, in positions, at every stage.", HNET, minimum=2, default=PRESETS_OWN
)
_OUTER_BLOCKS = Setting(
    "Blocks of encoders and decoders: attention in a window, or mamba (Mamba-2).",
    HNET,
    choices=OUTER_BLOCKS,
)
_BOUNDARIES = Setting(
    "Where chunks begin: learned; every, at a fixed length; or space, after each space.",
    HNET,
    choices=BOUNDARIES,
)


def hnet(
    *,
    dim: Dim,
    layers: Layers,
    heads: Heads,
    ffn: FFN,
    ctx: Context,
    outer_dim: tuple[int, ...] | int,
    outer_layers: tuple[int, ...] | int,
    outer_heads: tuple[int, ...] | int,
    outer_ffn: tuple[int, ...] | int,
    chunk_length: Annotated[tuple[int, ...] | int, _CHUNK_LENGTH],
    window: Window,
    sub_norms: SubNorms = True,
    streams: Streams = 1,
    outer_blocks: Annotated[str, _OUTER_BLOCKS] = OUTER_BLOCKS[0],
    states: int = 64,
    boundaries: Annotated[str, _BOUNDARIES] = "learned",
    **storage: Any,
) -> ModelConfig:
    """Build a model with stages of chunks: outer blocks, and dense blocks in the innermost stage.

    A single number in place of a tuple applies to all outer stages.
    """
    number = len(outer_dim) if isinstance(outer_dim, tuple) else 1
    sizes = [
        value if isinstance(value, tuple) else (value,) * number
        for value in (outer_dim, outer_layers, outer_heads, outer_ffn, chunk_length)
    ]
    for name, values in zip(STAGE_SETTINGS, sizes, strict=True):
        if len(values) != number or not number:
            raise setting_error(
                f"`{name}` has numbers for {len(values)} stages, and `outer_dim` for {number}",
                f"give a number for each stage, of which there are 1 to {MAX_OUTER_STAGES}",
            )
    stages = []
    for width, depth, stage_heads, mlp_width, length in zip(*sizes, strict=True):
        if outer_blocks == "mamba":
            block = BlockConfig(mixer=MambaConfig(heads=stage_heads, states=states))
        else:
            mixer = AttentionConfig(heads=stage_heads, window=window, sub_norm=sub_norms)
            block = BlockConfig(mixer=mixer, channel=MLPConfig(width=mlp_width, sub_norm=sub_norms))
        chunking = ChunkingConfig(boundaries=boundaries, length=length)
        blocks = (block,) * depth
        stages.append(StageConfig(dim=width, before=blocks, after=blocks, chunking=chunking))
    innermost = BlockConfig(
        mixer=AttentionConfig(heads=heads, sub_norm=sub_norms),
        channel=MLPConfig(width=ffn, sub_norm=sub_norms),
    )
    stages.append(StageConfig(dim=dim, streams=streams, blocks=(innermost,) * layers))
    return ModelConfig(ctx=ctx, stages=tuple(stages), **storage)


_BASE = dict(
    dim=768, layers=10, heads=12, ffn=2048, ctx=4096, outer_dim=(512,), outer_layers=(2,),
    outer_heads=(8,), outer_ffn=(1408,), chunk_length=(4,), window=128
)  # fmt: skip
FORM = Form(hnet, {"layers": MAX_BLOCKS, "outer_layers": 256})
PRESETS: dict[str, dict[str, Any]] = {
    "hnet-tiny": dict(
        dim=256, layers=3, heads=4, ffn=704, ctx=256, outer_dim=(128,), outer_layers=(1,),
        outer_heads=(4,), outer_ffn=(352,), chunk_length=(4,), window=32
    ),
    "hnet-small": dict(
        dim=384, layers=5, heads=6, ffn=1024, ctx=1024, outer_dim=(256,), outer_layers=(1,),
        outer_heads=(4,), outer_ffn=(704,), chunk_length=(4,), window=128
    ),
    "hnet-base": _BASE,
    "hnet-every": _BASE | dict(chunk_length=(32,), boundaries="every"),
    "hnet-long": _BASE | dict(ctx=16384, chunk_length=(32,), boundaries="every"),
    "hnet-code": _BASE | dict(ctx=16384, chunk_length=(128,), boundaries="every"),
    "hnet-two-stage": _BASE | dict(
        outer_dim=(384, 512), outer_layers=(2, 2), outer_heads=(6, 8), outer_ffn=(1024, 1408),
        chunk_length=(3, 3)
    ),
}  # fmt: skip
"""Arguments of the form, by preset."""

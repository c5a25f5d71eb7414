"""A model of dense blocks as the architecture Qwen3, which computes the same.

The order of turning queries and keys and of normalising them does not matter where the norm has no
gain: a turn leaves the root-mean-square as it is. Where ours has none, that of Qwen3 is ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.config.model import ModelConfig
from arbcli.config.parts import AttentionConfig, MLPConfig
from arbcli.config.parts.rotary import PLAIN
from arbcli.errors import ArbError
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import TernaryTensor


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a packed tensor that are a tensor of Qwen3."""

    gguf: str
    """Its name there."""
    hugging_face: str
    """Its name there."""
    rows: slice
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A packed tensor and all its parts; None for ones."""

    tensor: TernaryTensor | None
    parts: tuple[Part, ...]


ATTENTION = ("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")
MLP = ("ffn_gate", "gate_proj"), ("ffn_up", "up_proj")


class Shape(NamedTuple):
    """Settings of Qwen3 that follow from a model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rotary_base: float
    ffn: int
    ctx: int
    sub_norms: bool
    """Whether norms precede the output projections, for which Qwen3 has no place."""


def shape_of(config: ModelConfig) -> Shape | None:
    """Return the shape of a model of equal blocks of attention to all positions and MLP.

    None is any other model, and one whose attention has what Qwen3 has not.
    """
    main = config.main
    if len(config.stages) > 1 or config.beside or config.head or main.streams > 1:
        return None
    if main.memories or main.router or len(set(main.blocks)) != 1 or not main.adds_plainly:
        return None
    mixer, channel = main.blocks[0].mixer, main.blocks[0].channel
    if not isinstance(mixer, AttentionConfig) or not isinstance(channel, MLPConfig):
        return None
    if mixer.window is not None or mixer.sub_norm != channel.sub_norm or _unsaid(mixer):
        return None
    return Shape(
        dim=main.dim,
        layers=len(main.blocks),
        heads=mixer.heads,
        kv_heads=mixer.key_heads,
        head_width=mixer.width(config.site()),
        rotary_base=mixer.rotary.base,
        ffn=channel.width,
        ctx=config.ctx,
        sub_norms=mixer.sub_norm,
    )


def known_shape(config: ModelConfig) -> Shape:
    """Return the shape of a model that was checked to have one.

    Raises:
        ValueError: it has none.
    """
    shape = shape_of(config)
    if shape is None:
        raise ValueError("the model has more than dense blocks and attention")
    return shape


def check_attention(config: ModelConfig) -> None:
    """Check that Qwen3 has all that attention of a model has.

    Raises:
        ArbError: it lacks something.
    """
    for _, part in config.sited_parts():
        if isinstance(part, AttentionConfig) and (unsaid := _unsaid(part)):
            raise ArbError(
                f"Qwen3, the architecture of exports, has no {unsaid}",
                hint="use `--to safetensors`, which arb reads",
            )


def _unsaid(mixer: AttentionConfig) -> str | None:
    """Name what attention has and Qwen3 has not."""
    found = {
        "biases": mixer.bias or mixer.output_bias,
        "sinks": mixer.sink,
        "queries and keys without a norm": mixer.query_key_norm == "none",
        "rotary positions that are scaled or partial": replace(mixer.rotary, base=PLAIN.base)
        != PLAIN,
    }
    return next((name for name, there in found.items() if there), None)


def sources(model: LanguageModel) -> Iterator[Source]:
    """Go through the tensors of a model that has a `Shape`, and name what they are in Qwen3."""
    shape, tensors = known_shape(model.config), model.packed_tensors()
    heights = [shape.head_width * heads for heads in (shape.heads, *[shape.kv_heads] * 2)]
    yield _whole(tensors["embedding.weight"], "token_embd", "model.embed_tokens")
    for index in range(shape.layers):
        block, ours, theirs = f"blocks.{index}.", f"blk.{index}.", f"model.layers.{index}."
        norm = tensors[f"{block}attention_norm.weight"]
        yield _norm(norm, f"{ours}attn_norm", f"{theirs}input_layernorm")
        qkv, attention = tensors[f"{block}attention.qkv.weight"], f"{theirs}self_attn."
        yield Source(qkv, _split(qkv, ours, attention, ATTENTION, heights))
        for letter, kind in (("q", "query"), ("k", "key")):
            names = f"{ours}attn_{letter}_norm.weight", f"{attention}{letter}_norm.weight"
            part = Part(*names, slice(0, shape.head_width), (shape.head_width,))
            yield Source(tensors.get(f"{block}attention.{kind}_gain.weight"), (part,))
        output = tensors[f"{block}attention.output.weight"]
        yield _whole(output, f"{ours}attn_output", f"{attention}o_proj")
        norm = tensors[f"{block}mlp_norm.weight"]
        yield _norm(norm, f"{ours}ffn_norm", f"{theirs}post_attention_layernorm")
        gate_up = tensors[f"{block}mlp.gate_up.weight"]
        yield Source(gate_up, _split(gate_up, ours, f"{theirs}mlp.", MLP, [shape.ffn] * 2))
        down = tensors[f"{block}mlp.output.weight"]
        yield _whole(down, f"{ours}ffn_down", f"{theirs}mlp.down_proj")
    yield _norm(tensors["norm.weight"], "output_norm", "model.norm")
    yield _whole(tensors["head.weight"], "output", "lm_head")


def read(source: Source) -> Iterator[tuple[Part, Tensor]]:
    """Decode a tensor once, and yield the weights of its parts, float32 of their shapes."""
    if source.tensor is None:
        yield from ((part, torch.ones(part.shape)) for part in source.parts)
        return
    weight = source.tensor.weight(torch.float32)
    for part in source.parts:
        yield part, weight[part.rows].view(part.shape)


def _whole(tensor: TernaryTensor, ours: str, theirs: str) -> Source:
    rows = slice(0, tensor.out_features)
    shape = tensor.out_features, tensor.in_features
    return Source(tensor, (Part(f"{ours}.weight", f"{theirs}.weight", rows, shape),))


def _norm(tensor: TernaryTensor, ours: str, theirs: str) -> Source:
    rows = slice(0, tensor.out_features)  # of gains each is one
    return Source(
        tensor, (Part(f"{ours}.weight", f"{theirs}.weight", rows, (tensor.num_weights,)),)
    )


def _split(
    tensor: TernaryTensor,
    ours: str,
    theirs: str,
    names: tuple[tuple[str, str], ...],
    heights: list[int],
) -> tuple[Part, ...]:
    """Cut a fused matrix into parts of these numbers of rows."""
    return tuple(
        Part(
            f"{ours}{here}.weight",
            f"{theirs}{there}.weight",
            slice(end - height, end),
            (height, tensor.in_features),
        )
        for (here, there), height, end in zip(names, heights, accumulate(heights), strict=True)
    )

"""A model of dense blocks as Llama, Mistral, Qwen 2, Qwen 3 or BitNet, which computes the same.

`sources` names the tensors, for an import as for an export. The order of rotating queries and keys
and of normalising them does not matter where the norm has no gain: a rotation leaves the
root-mean-square as it is. Where ours has none, that of Qwen 3 is ones.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.base.errors import ArbError
from arbcli.config.model import BlockConfig, ModelConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.model.baselines import FloatRMSNorm, FloatWeight
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import TernaryTensor
from arbcli.model.parts.attention import Attention
from arbcli.model.parts.mlp import MLP


class Architecture(NamedTuple):
    """Model architecture of other programs."""

    model_type: str
    """Its name in a `config.json`."""
    class_name: str
    """Name of its architecture in Transformers."""
    gguf: str
    """Name of its architecture in llama.cpp."""
    interleaved: bool
    """Whether llama.cpp rotates neighbouring numbers of a head as a pair, not i and i + d / 2."""


ARCHITECTURES = {
    kind.model_type: kind
    for kind in (
        Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", False),
        Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", False),
        Architecture("llama", "LlamaForCausalLM", "llama", True),
        Architecture("mistral", "MistralForCausalLM", "llama", True),
        Architecture("bitnet", "BitNetForCausalLM", "bitnet", False),
    )
}
"""Architectures by `model_type` in `config.json`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a packed tensor that are a tensor of another program."""

    gguf: str
    """Its name there."""
    hugging_face: str
    """Its name there."""
    rows: slice
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor and all its parts; None for ones. That of a baseline is float."""

    tensor: TernaryTensor | FloatWeight | None
    parts: tuple[Part, ...]


ATTENTION = ("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")
GATED = ("ffn_gate", "gate_proj"), ("ffn_up", "up_proj")


HEAD = "lm_head"
"""Name of the head, which a folder may have besides the embedding that it is tied to."""


class Shape(NamedTuple):
    """Settings of an architecture that follow from a model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rotary: RotaryConfig
    ffn: int
    ctx: int
    windows: tuple[int | None, ...]
    """Window of each layer; None for full attention."""
    vocabulary: int
    tied: bool
    """Whether the head is the embedding."""
    norm_eps: float
    bias: bool
    """Whether queries, keys and values have biases."""
    output_bias: bool
    norms_heads: bool
    """Whether queries and keys are normalised."""
    sub_norms: bool
    """Whether norms precede the output projections, for which other programs need custom code."""
    bitnet: bool
    """Whether blocks are BitNet's."""

    @property
    def architecture(self) -> Architecture:
        """The equivalent architecture."""
        if self.bitnet:
            return ARCHITECTURES["bitnet"]
        if self.norms_heads:
            return ARCHITECTURES["qwen3"]
        if self.bias:
            return ARCHITECTURES["llama" if self.output_bias else "qwen2"]
        return ARCHITECTURES["mistral"]


def shape_of(config: ModelConfig) -> Shape | None:
    """Return the shape of a model of dense blocks that differ by their windows at most.

    None for any other model, and if no architecture has such attention.
    """
    main = config.main
    if len(config.stages) > 1 or config.beside or config.head or main.streams > 1:
        return None
    if main.memories or main.router or not main.adds_plainly or config.composite:
        return None
    if len({_alike(block) for block in main.blocks}) != 1:
        return None
    mixer, channel = main.blocks[0].mixer, main.blocks[0].channel
    if not isinstance(mixer, AttentionConfig) or not isinstance(channel, MLPConfig):
        return None
    if mixer.sub_norm != channel.sub_norm or mixer.bitnet != channel.bitnet or _unsupported(mixer):
        return None
    return Shape(
        dim=main.dim,
        layers=len(main.blocks),
        heads=mixer.heads,
        kv_heads=mixer.key_heads,
        head_width=mixer.width(config.layer_spec()),
        rotary=mixer.rotary,
        ffn=channel.width,
        ctx=config.ctx,
        windows=tuple(
            block.mixer.window for block in main.blocks if isinstance(block.mixer, AttentionConfig)
        ),
        vocabulary=config.vocabulary,
        tied=config.tied,
        norm_eps=config.norm_eps,
        bias=mixer.bias,
        output_bias=mixer.output_bias,
        norms_heads=mixer.query_key_norm != "none",
        sub_norms=mixer.sub_norm and not mixer.bitnet,
        bitnet=mixer.bitnet,
    )


def _alike(block: BlockConfig) -> BlockConfig:
    """Return a block without its window, which may differ, and its rules, which no format has."""
    mixer, channel = block.mixer, block.channel
    if isinstance(mixer, AttentionConfig):
        mixer = replace(mixer, window=None)
    return BlockConfig(
        mixer=mixer and replace(mixer, rule=None), channel=channel and replace(channel, rule=None)
    )


def known_shape(config: ModelConfig) -> Shape:
    """Return the shape of a model that was checked to have one.

    Raises:
        ValueError: it has none.
    """
    shape = shape_of(config)
    if shape is None:
        raise ValueError("the model has more than dense blocks of attention")
    return shape


def check_attention(config: ModelConfig) -> None:
    """Check that some architecture supports the attention of a model.

    Raises:
        ArbError: none has.
    """
    for _, part in config.specs_and_parts():
        if isinstance(part, AttentionConfig) and (feature := _unsupported(part)):
            raise ArbError(f"GGUF has no architecture with {feature}", other_formats(config))


def other_formats(config: ModelConfig) -> str:
    """Return a hint that names the formats of a model that GGUF cannot hold."""
    if config.weights == "ternary" or fits_folder(shape_of(config)):
        return "use `--to hf` or `--to safetensors`"
    return "use `--to safetensors`"


def fits_folder(shape: Shape | None) -> bool:
    """Return whether Transformers has an architecture with a shape.

    It needs windows that are all alike, and for Llama none.
    """
    if shape is None:
        return False
    windows = {min(window or shape.ctx, shape.ctx) for window in shape.windows}
    return windows == {shape.ctx} or (
        len(windows) == 1 and shape.architecture.model_type not in ("llama", "bitnet")
    )


def _unsupported(mixer: AttentionConfig) -> str | None:
    """Return the name of an attention feature that no architecture supports."""
    normed = mixer.query_key_norm != "none"
    features = {
        "sinks": mixer.sink,
        "rotary positions that are partial": mixer.rotary.share != 1,
        "norms before the output projections, and queries and keys without a norm": mixer.sub_norm
        and not (normed or mixer.bitnet),
        "BitNet with biases, or norms of queries and keys": mixer.bitnet and (normed or mixer.bias),
        "biases of the output projection alone": mixer.output_bias and not mixer.bias,
        "norms of queries and keys, and biases of the projections to them alone": normed
        and mixer.bias
        and not mixer.output_bias,
    }
    return next((name for name, present in features.items() if present), None)


def sources(model: LanguageModel) -> Iterator[Source]:
    """Yield the tensors of a model with a `Shape`, with their names in other programs."""
    shape = known_shape(model.config)
    heights = [shape.head_width * heads for heads in (shape.heads, *[shape.kv_heads] * 2)]
    yield _matrix(model.embedding, "token_embd", "model.embed_tokens")
    for index, block in enumerate(model.blocks):
        gguf, hugging_face = f"blk.{index}.", f"model.layers.{index}."
        (attention, attention_norm, _), (mlp, mlp_norm, _) = block.branches
        assert isinstance(attention, Attention), "a model with a `Shape` has no other mixer"
        assert isinstance(mlp, MLP), "nor another channel mixer"
        self_attn = f"{hugging_face}self_attn."
        yield _vector(attention_norm, f"{gguf}attn_norm", f"{hugging_face}input_layernorm")
        yield _split(attention.qkv, "weight", gguf, self_attn, ATTENTION, heights)
        if attention.bias:
            yield _split(attention.bias, "bias", gguf, self_attn, ATTENTION, heights)
        if shape.norms_heads:
            for letter, gain in (("q", attention.query_gain), ("k", attention.key_gain)):
                names = f"{gguf}attn_{letter}_norm.weight", f"{self_attn}{letter}_norm.weight"
                part = Part(*names, slice(0, shape.head_width), (shape.head_width,))
                yield Source(gain.weight if gain else None, (part,))
        if shape.bitnet and attention.sub_norm is not None:
            yield _vector(attention.sub_norm, f"{gguf}attn_sub_norm", f"{self_attn}attn_sub_norm")
        yield _matrix(attention.output, f"{gguf}attn_output", f"{self_attn}o_proj")
        if attention.output_bias:
            names = f"{gguf}attn_output", f"{self_attn}o_proj"
            yield _vector(attention.output_bias, *names, "bias")
        yield _vector(mlp_norm, f"{gguf}ffn_norm", f"{hugging_face}post_attention_layernorm")
        yield _split(mlp.gate_up, "weight", gguf, f"{hugging_face}mlp.", GATED, [shape.ffn] * 2)
        if shape.bitnet:
            yield _vector(mlp.sub_norm, f"{gguf}ffn_sub_norm", f"{hugging_face}mlp.ffn_sub_norm")
        yield _matrix(mlp.output, f"{gguf}ffn_down", f"{hugging_face}mlp.down_proj")
    yield _vector(model.norm, "output_norm", "model.norm")
    if not shape.tied:
        yield _matrix(model.head, "output", HEAD)


def read(source: Source) -> Iterator[tuple[Part, Tensor]]:
    """Decode a tensor once, and yield the weights of its parts, float32 of their shapes."""
    if source.tensor is None:
        yield from ((part, torch.ones(part.shape)) for part in source.parts)
        return
    weight = source.tensor.weight(torch.float32).detach()
    for part in source.parts:
        yield part, weight[part.rows].view(part.shape)


def _weight(layer: nn.Module) -> TernaryTensor | FloatWeight:
    weight = layer.weight
    assert isinstance(weight, TernaryTensor | FloatWeight), "every such layer has one"
    return weight


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of rows and columns of a layer's weights."""
    weight = _weight(layer)
    return weight.out_features, weight.in_features


def _matrix(layer: nn.Module, gguf: str, hugging_face: str) -> Source:
    return _split(layer, "weight", "", "", ((gguf, hugging_face),), [_sizes(layer)[0]])


def _vector(layer: nn.Module, gguf: str, hugging_face: str, kind: str = "weight") -> Source:
    """Name a norm, whose ones are a row, or a packed vector, whose numbers are rows."""
    if isinstance(layer, FloatRMSNorm):
        size, weight = layer.dim, None
    else:
        size, weight = math.prod(_sizes(layer)), _weight(layer)
    part = Part(f"{gguf}.{kind}", f"{hugging_face}.{kind}", slice(0, size), (size,))
    return Source(weight, (part,))


def _split(
    layer: nn.Module,
    kind: str,
    gguf: str,
    hugging_face: str,
    names: tuple[tuple[str, str], ...],
    rows: list[int],
) -> Source:
    """Cut a fused matrix, or a fused bias, into parts of these numbers of rows."""
    columns = _sizes(layer)[1:] if kind == "weight" else ()
    return Source(
        _weight(layer),
        tuple(
            Part(
                f"{gguf}{name}.{kind}",
                f"{hugging_face}{hf_name}.{kind}",
                slice(end - height, end),
                (height, *columns),
            )
            for (name, hf_name), height, end in zip(names, rows, accumulate(rows), strict=True)
        ),
    )

"""Export to GGUF, the format of llama.cpp: models of dense blocks without sub-norms.

llama.cpp rotates the elements 2 i and 2 i + 1 of a head as a pair in Llama and Mistral, and the
elements i and i + d / 2, as arb does, in other models. Rows of queries and keys of the former are
written in the order 0, d / 2, 1, d / 2 + 1 and so on. Angles that are scaled as in Llama 3 need a
tensor of divisors.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.base.atomic_files import write_file
from arbcli.base.errors import ArbError
from arbcli.base.reading import read_json
from arbcli.base.run_files import CONFIG, TOKENIZER
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.data.tokens import byte_symbols
from arbcli.generation.load import Weights
from arbcli.interop.gguf import container
from arbcli.interop.gguf.block_types import (
    BF16,
    F32,
    Q2_0,
    Q4_0,
    Q8_0,
    TYPES,
    BlockType,
    encode_digits,
    encode_numbers,
)
from arbcli.interop.gguf.tokens import NORMAL, token_keys
from arbcli.interop.huggingface import dense
from arbcli.interop.huggingface.companions import companions_of, tokenizer_of
from arbcli.kernels.codec.decode_digits import integers
from arbcli.kernels.codec.packed import scales_torch
from arbcli.model.baselines import FloatWeight
from arbcli.model.layers.rotary import rotary_rates
from arbcli.model.packed import TernaryTensor

END = 0
"""Byte that ends a text in generation; no text contains it."""
ROTATED_NAMES = re.compile(r"\.attn_[qk]\.")
"""Pattern of the names of matrices and biases of rotated queries and keys."""
TYPE_OF_GROUP_SIZE = {32: Q4_0, 96: Q4_0, 64: Q2_0, 128: Q2_0}
"""Smallest type that represents trits, by the number of weights per scale; BF16 for others."""


def write_model(path: Path, weights: Weights, name: str, kind: str | None) -> BlockType:
    """Write a model as one GGUF file.

    Args:
        path: path of the file.
        weights: a model of dense blocks without sub-norms.
        name: name of the model.
        kind: type of the matrices, a name of `TYPES`; None is the smallest one that represents the
            weights exactly.

    Returns:
        The type of the matrices.

    Raises:
        ArbError: GGUF cannot represent the model, or the file cannot be written.
    """
    config = weights.model.config
    shape = _supported_shape(config)
    companions = companions_of(weights.path.parent, config)
    tokenizer = tokenizer_of(weights)
    architecture = shape.architecture
    if companions is not None:  # of the imported model
        architecture = dense.ARCHITECTURES[read_json(companions / CONFIG, {})["model_type"]]
    check_architecture(config, architecture)
    if tokenizer:
        tokens = token_keys(tokenizer, companions, config)
    elif config.vocabulary == VOCABULARY:
        tokens = _byte_tokens()
    else:
        raise ArbError(
            f"`{weights.path.parent}` has no `{TOKENIZER}`, and GGUF holds a tokenizer",
            "put that of the model there, or use `--to hf`",
        )
    typed_sources = [
        (source, TYPES[kind] if kind else smallest_type(config, source.tensor))
        for source in dense.sources(weights.model)
    ]
    entries = [_entry(part, type) for source, type in typed_sources for part in source.parts]
    keys = _keys(shape, name, weights, architecture) | tokens
    divisors = _divisors(shape)
    if divisors is not None:
        entries.append(container.Entry("rope_freqs.weight", tuple(divisors.shape), F32))

    def tensors() -> Iterator[Tensor]:
        for source, type in typed_sources:
            yield from _encode(source, type, _row_orders(source, shape, architecture))
        if divisors is not None:
            yield encode_numbers("rope_freqs.weight", divisors, F32)

    write_file(path, lambda file: container.write_gguf(file, keys, entries, tensors()))
    return TYPES[kind] if kind else smallest_type(config)


def check_architecture(config: ModelConfig, architecture: dense.Architecture) -> None:
    """Check that llama.cpp's implementation of an architecture supports a model's settings.

    Raises:
        ArbError: a setting is not supported.
    """
    shape = dense.known_shape(config)
    scaling = shape.rotary.scaling
    is_yarn = scaling == "yarn"
    unsupported = {
        "bounds of yarn other than 1 and 32": is_yarn and shape.rotary.bounds != (1, 32),
        f"positions scaled as by `{scaling}`": scaling == "llama3" and architecture.gguf != "llama",
        "biases": architecture.gguf == "qwen3" and shape.bias,
        f"heads of {shape.head_width} numbers": architecture.gguf == "qwen2"
        and shape.heads * shape.head_width != shape.dim,
    }
    for part, is_present in unsupported.items():
        if is_present:
            raise ArbError(
                f"arb writes no {part} for llama.cpp's {architecture.gguf}",
                dense.other_formats(config),
            )


def _divisors(shape: dense.Shape) -> Tensor | None:
    """Compute the divisor of each pair's angle, (d / 2,) float32; None if all are 1."""
    if shape.rotary.scaling != "llama3":
        return None
    plain = rotary_rates(shape.head_width, RotaryConfig(base=shape.rotary.base))
    return (plain / rotary_rates(shape.head_width, shape.rotary)).to(torch.float32)


def read_reordered(file: container.GGUFFile, name: str) -> Tensor:
    """Decode a matrix, (N, K), or a vector to float32, with its rows in the order of `arb`.

    Raises:
        KeyError: the file has no tensor of this name.
    """
    weight, kind = file.tensor(name), file.keys.get("general.architecture")
    width = file.keys.get(f"{kind}.attention.key_length")
    interleaved = any(
        known.gguf == kind and known.interleaved for known in dense.ARCHITECTURES.values()
    )
    if not (interleaved and ROTATED_NAMES.search(name) and width and len(weight) % width == 0):
        return weight
    return weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def _row_orders(
    source: dense.Source, shape: dense.Shape, architecture: dense.Architecture
) -> dict[str, Tensor]:
    """Return row indices, int64, of each tensor whose rows are reordered, by name."""
    if not architecture.interleaved:
        return {}
    orders = {}
    for part in source.parts:
        if ROTATED_NAMES.search(part.gguf):
            rows = torch.arange(part.shape[0]).view(-1, 2, shape.head_width // 2)
            orders[part.gguf] = rows.transpose(1, 2).flatten()
    return orders


def smallest_type(
    config: ModelConfig, tensor: TernaryTensor | FloatWeight | None = None
) -> BlockType:
    """Choose the smallest type for a tensor, or None for the blocks; F32 for a baseline.

    An embedding or a head that is read with all digits has another type than ternary blocks.
    """
    if config.weights != "ternary":
        return F32
    trit_type = TYPE_OF_GROUP_SIZE.get(config.group_size, BF16)
    reads_all = isinstance(tensor, TernaryTensor) and tensor.reads_digits
    is_ternary = config.digits == "trit" and not reads_all
    return trit_type if is_ternary or trit_type is BF16 else Q8_0


def _supported_shape(config: ModelConfig) -> dense.Shape:
    """Return the shape of a model that an architecture of llama.cpp can represent.

    Raises:
        ArbError: no architecture can.
    """
    dense.check_attention(config)
    shape = dense.shape_of(config)
    if shape is None:
        raise ArbError(
            "GGUF has no architecture with blocks other than dense attention and MLP",
            f"{dense.other_formats(config)}; or train one of tiny, small, base and 1b,"
            " with `--no-sub-norms`",
        )
    if shape.bitnet:
        raise ArbError(
            "llama.cpp computes the MLP of a BitNet with SiLU, and this one has relu(gate)**2",
            "use `--to hf`, or `--to safetensors`, which arb reads",
        )
    if shape.sub_norms:
        raise ArbError(
            "GGUF has no architecture with norms before the output projections",
            f"train with `--no-sub-norms`; or {dense.other_formats(config)}",
        )
    return shape


def _entry(part: dense.Part, kind: BlockType) -> container.Entry:
    return container.Entry(part.gguf, part.shape, kind if len(part.shape) == 2 else F32)


def _encode(source: dense.Source, kind: BlockType, orders: dict[str, Tensor]) -> Iterator[Tensor]:
    """Encode the parts of a tensor in a type; vectors are float32."""
    all_rows = slice(None)
    is_matrix = len(source.parts[0].shape) == 2
    if not is_matrix or kind.dtype is not None:
        for part, weight in dense.read(source):
            weight = weight[orders.get(part.gguf, all_rows)]
            yield encode_numbers(part.gguf, weight, kind if is_matrix else F32)
        return
    if not isinstance(source.tensor, TernaryTensor):
        raise ValueError("a matrix of the model is not packed")
    packed = source.tensor.packed
    digits, scales = integers(packed), scales_torch(packed.exponent, packed.fraction) / packed.unit
    for part in source.parts:
        order = orders.get(part.gguf, all_rows)
        rounded = digits[part.rows][order], scales[part.rows][order]
        yield encode_digits(part.gguf, *rounded, packed.group_size, kind)


def _keys(
    shape: dense.Shape, name: str, weights: Weights, architecture: dense.Architecture
) -> dict[str, tuple[int, Any]]:
    """Return the metadata of the model and of its checkpoint."""
    windows, rotary = [window for window in shape.windows if window], shape.rotary
    fields: dict[str, tuple[int, Any]] = {
        "context_length": (container.UINT32, min((shape.ctx, *windows))),
        "embedding_length": (container.UINT32, shape.dim),
        "block_count": (container.UINT32, shape.layers),
        "feed_forward_length": (container.UINT32, shape.ffn),
        "attention.head_count": (container.UINT32, shape.heads),
        "attention.head_count_kv": (container.UINT32, shape.kv_heads),
        "attention.key_length": (container.UINT32, shape.head_width),
        "attention.value_length": (container.UINT32, shape.head_width),
        "attention.layer_norm_rms_epsilon": (container.FLOAT32, shape.norm_eps),
        "rope.freq_base": (container.FLOAT32, rotary.base),
        "vocab_size": (container.UINT32, shape.vocabulary),
    }
    if architecture.interleaved:
        fields["rope.dimension_count"] = (container.UINT32, shape.head_width)
    if rotary.scaling in ("linear", "yarn"):
        fields["rope.scaling.type"] = (container.STRING, rotary.scaling)
        fields["rope.scaling.factor"] = (container.FLOAT32, rotary.factor)
    if rotary.scaling == "yarn":
        fields["rope.scaling.original_context_length"] = (container.UINT32, rotary.original_ctx)
    return {
        "general.architecture": (container.STRING, architecture.gguf),
        "general.name": (container.STRING, name),
        "general.quantization_version": (container.UINT32, 2),
        **{f"{architecture.gguf}.{key}": value for key, value in fields.items()},
        "arb.step": (container.UINT32, weights.checkpoint.step),
        "arb.origin": (container.STRING, weights.origin),
    }


def _byte_tokens() -> dict[str, tuple[int, Any]]:
    """Return the metadata of a tokenizer of 256 bytes."""
    return {
        "tokenizer.ggml.model": (container.STRING, "gpt2"),
        "tokenizer.ggml.pre": (container.STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (container.STRING, byte_symbols()),
        "tokenizer.ggml.token_type": (container.INT32, [NORMAL] * VOCABULARY),
        "tokenizer.ggml.merges": (container.STRING, []),
        "tokenizer.ggml.bos_token_id": (container.UINT32, END),
        "tokenizer.ggml.eos_token_id": (container.UINT32, END),
        "tokenizer.ggml.add_bos_token": (container.BOOL, False),
        "tokenizer.ggml.add_eos_token": (container.BOOL, False),
    }

"""GGUF, for llama.cpp and what is built on it: dense blocks without sub-norms, as Qwen3."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.checkpoint import write_file
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.errors import ArbError
from arbcli.export.block_types import (
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
from arbcli.export.gguf_file import (
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    Entry,
    write_gguf,
)
from arbcli.export.qwen3 import Part, Source, check_attention, known_shape, read, shape_of, sources
from arbcli.infer.load import Weights
from arbcli.kernels.codec.decode_digits import digits_torch
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.codec.scales import scales_torch
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.norm import NORM_EPS

END = 0
"""The byte that ends a text: no text has it, and whoever generates stops there."""
NORMAL_TOKEN = 1
OF_GROUP_SIZE = {32: Q4_0, 96: Q4_0, 64: Q2_0, 128: Q2_0}
"""The smallest type that holds trits, by the weights that share a scale; for others BF16."""


def write_model(path: Path, weights: Weights, name: str, kind: str | None) -> BlockType:
    """Write a model as one GGUF file.

    Args:
        path: of the file.
        weights: a model of dense blocks without sub-norms.
        name: of the model.
        kind: of the matrices, a name of `TYPES`; None is the smallest that holds what the weights
            are made of.

    Returns:
        The type of the matrices.

    Raises:
        ArbError: GGUF cannot hold the model, or the file cannot be written.
    """
    model = weights.model
    check_model(model)
    chosen = TYPES[kind] if kind else smallest_type(model.config)
    every = list(sources(model))
    entries = [_entry(part, chosen) for source in every for part in source.parts]
    keys = _keys(model.config, name, weights)

    def parts() -> Iterator[Tensor]:
        for source in every:
            yield from _encoded(source, chosen)

    write_file(path, lambda file: write_gguf(file, keys, entries, parts()))
    return chosen


def smallest_type(config: ModelConfig) -> BlockType:
    """Choose the smallest type that holds what the weights of a model are made of."""
    of_trits = OF_GROUP_SIZE.get(config.group_size, BF16)
    return of_trits if config.digits == "trit" or of_trits is BF16 else Q8_0


def check_model(model: LanguageModel) -> None:
    """Refuse what Qwen3 has no place for.

    Raises:
        ArbError: it is refused.
    """
    check_attention(model.config)
    shape = shape_of(model.config)
    if shape is None:
        raise ArbError(
            "GGUF has no architecture for a model of more than dense blocks and attention",
            hint="use `--to safetensors`, or train one of tiny, small, base and 1b",
        )
    if shape.sub_norms:
        raise ArbError(
            "GGUF has no architecture with norms before the output projections",
            hint="train with `--no-sub-norms`; or use `--to hf` or `--to safetensors`",
        )


def _entry(part: Part, kind: BlockType) -> Entry:
    return Entry(part.gguf, part.shape, kind if len(part.shape) == 2 else F32)


def _encoded(source: Source, kind: BlockType) -> Iterator[Tensor]:
    """Write the parts of a tensor as the bytes of a type; those of a norm are float32."""
    is_matrix = len(source.parts[0].shape) == 2
    if not is_matrix or kind.dtype is not None:
        for part, weight in read(source):
            yield encode_numbers(part.gguf, weight, kind if is_matrix else F32)
        return
    if source.tensor is None:
        raise ValueError("a matrix of a model has no tensor")
    packed = source.tensor.packed
    digits, scales = integers(packed), scales_torch(packed.exponent, packed.fraction) / packed.unit
    for part in source.parts:
        rows = part.rows
        yield encode_digits(part.gguf, digits[rows], scales[rows], packed.group_size, kind)


def integers(packed: Packed) -> Tensor:
    """Read what weights are made of, (N, K) int8: trits, or z where they are all digits."""
    if packed.remainder is None:
        return unpack_trits(packed.trits, packed.in_features)
    return (digits_torch(packed, torch.float32) * packed.unit).to(torch.int8)


def _keys(config: ModelConfig, name: str, weights: Weights) -> dict[str, tuple[int, Any]]:
    """Say what a reader has to know of the model, and where it comes from."""
    shape = known_shape(config)
    ours = {
        "context_length": (UINT32, config.ctx),
        "embedding_length": (UINT32, shape.dim),
        "block_count": (UINT32, shape.layers),
        "feed_forward_length": (UINT32, shape.ffn),
        "attention.head_count": (UINT32, shape.heads),
        "attention.head_count_kv": (UINT32, shape.kv_heads),
        "attention.key_length": (UINT32, shape.head_width),
        "attention.value_length": (UINT32, shape.head_width),
        "attention.layer_norm_rms_epsilon": (FLOAT32, NORM_EPS),
        "rope.freq_base": (FLOAT32, shape.rotary_base),
        "vocab_size": (UINT32, VOCABULARY),
    }
    return {
        "general.architecture": (STRING, "qwen3"),
        "general.name": (STRING, name),
        "general.quantization_version": (UINT32, 2),
        **{f"qwen3.{key}": value for key, value in ours.items()},
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (STRING, byte_symbols()),
        "tokenizer.ggml.token_type": (INT32, [NORMAL_TOKEN] * VOCABULARY),
        "tokenizer.ggml.merges": (STRING, []),
        "tokenizer.ggml.bos_token_id": (UINT32, END),
        "tokenizer.ggml.eos_token_id": (UINT32, END),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.ggml.add_eos_token": (BOOL, False),
        "arb.step": (UINT32, weights.checkpoint.step),
        "arb.origin": (STRING, weights.origin),
    }


def byte_symbols() -> list[str]:
    """List the characters by which a byte-level BPE vocabulary writes the bytes 0 to 255.

    Printable bytes stand for themselves, the others for the characters from 256 on.
    Source: encoder.py of openai/gpt-2, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, others = [], 0
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else 256 + others))
        others += byte not in printable
    return symbols

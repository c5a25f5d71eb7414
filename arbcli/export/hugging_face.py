"""A folder that Transformers loads: weights, tokenizer and a card, for a model of dense blocks."""

import json
import math
import os
import shutil
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.checkpoint import LARGEST_HEADER, write_file, write_json, write_text
from arbcli.config.model import VOCABULARY, BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts import AttentionConfig, MLPConfig
from arbcli.errors import ArbError
from arbcli.export.block_types import BF16, F32, BlockType, encode_numbers
from arbcli.export.card import model_card
from arbcli.export.gguf import END, byte_symbols
from arbcli.export.gguf_file import Entry
from arbcli.export.qwen3 import Part, check_attention, known_shape, read, shape_of, sources
from arbcli.infer.load import Weights
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.norm import NORM_EPS
from arbcli.reading import check_schema, open_regular, parse_json, read_json

CODE = Path(__file__).with_name("modeling_arb.py")
"""What Transformers runs for a model with sub-norms."""
TYPES = {"bf16": BF16, "f32": F32}
"""By the names that `--type` takes; bf16 holds every weight."""
SHAPE = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
     "sliding_window"), int,
)  # fmt: skip
"""Fields of a configuration that are read."""
ENTRY = {"dtype": str, "shape": list[int], "data_offsets": list[int]}
"""Of a tensor in the header of weights."""
_DTYPES = {"BF16": "bfloat16", "F32": "float32"}


def write_folder(path: Path, weights: Weights, name: str, kind: str | None) -> BlockType:
    """Write a model as a folder, whole or not at all.

    Args:
        path: of the folder, which does not exist.
        weights: a model of dense blocks.
        name: of the model.
        kind: of the weights, a name of `TYPES`; None is bf16.

    Returns:
        The type of the weights.

    Raises:
        ArbError: Transformers has no place for the model, or a file cannot be written.
    """
    check_attention(weights.model.config)
    if shape_of(weights.model.config) is None:
        raise ArbError(
            "Transformers has no model that is more than dense blocks and attention",
            hint="use `--to safetensors`, which arb reads",
        )
    chosen = TYPES[kind or "bf16"]
    part = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(part, ignore_errors=True)  # a killed process left it
    try:
        part.mkdir()
        _write_files(part, weights, name, chosen)
        os.replace(part, path)
    except OSError as error:
        raise ArbError(
            f"cannot write `{path}`: {error.strerror}", hint="check permissions and free space"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return chosen


def _write_files(folder: Path, weights: Weights, name: str, kind: BlockType) -> None:
    config = weights.model.config
    ends = {"eos_token_id": END, "pad_token_id": END}
    write_file(folder / ModelFolder.WEIGHTS, lambda file: _write_weights(file, weights, kind))
    write_json(folder / ModelFolder.CONFIG, _config(config, kind) | ends | _about(weights))
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer.json", _tokenizer())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.ctx,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_text(folder / "README.md", model_card(weights, name))
    if known_shape(config).sub_norms:
        write_text(folder / CODE.name, CODE.read_text())


def _write_weights(file: BufferedIOBase, weights: Weights, kind: BlockType) -> None:
    """Write a safetensors file, one tensor at a time."""
    every = list(sources(weights.model))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in every:
        for part in source.parts:
            begin, end = end, end + kind.num_bytes(math.prod(part.shape))
            header[part.hugging_face] = {
                "dtype": kind.name, "shape": list(part.shape), "data_offsets": [begin, end]
            }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for source in every:
        for part, weight in read(source):
            data = encode_numbers(part.hugging_face, weight, kind)
            file.write(data.contiguous().view(-1).numpy().data)


def _config(config: ModelConfig, kind: BlockType) -> dict[str, Any]:
    """Say what Transformers has to know; every layer attends to the last `ctx` bytes, as ours."""
    shape = known_shape(config)
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": _DTYPES[kind.name],
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "hidden_size": shape.dim,
        "initializer_range": 0.02,
        "intermediate_size": shape.ffn,
        "layer_types": ["sliding_attention"] * shape.layers,
        "max_position_embeddings": config.ctx,
        "max_window_layers": 0,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rotary_base},
        "rope_theta": shape.rotary_base,
        "sliding_window": config.ctx,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": VOCABULARY,
    }
    if shape.sub_norms:
        module = CODE.stem
        values |= {
            "architectures": ["ArbForCausalLM"],
            "model_type": "arb_byte_lm",
            "auto_map": {
                "AutoConfig": f"{module}.ArbConfig",
                "AutoModelForCausalLM": f"{module}.ArbForCausalLM",
            },
        }
    return values


def _about(weights: Weights) -> dict[str, Any]:
    return {"arb.step": weights.checkpoint.step, "arb.origin": weights.origin}


class ModelFolder:
    """A folder that is read; its tensors have the names of GGUF.

    Raises:
        ArbError: it is none that `arb export` writes, or a file is damaged.
    """

    CONFIG, WEIGHTS = "config.json", "model.safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, Any] = {}
        """What is said of the model."""
        self.entries: dict[str, Entry] = {}
        """The tensors by name."""
        self._begins: dict[str, int] = {}
        try:
            self.keys = read_json(path / self.CONFIG, SHAPE, "name a folder of `arb export`")
            self._read_header()
        except (KeyError, TypeError, ValueError) as error:
            raise self._refused(f"it is none of `arb export`: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """Read a tensor: float32."""
        entry = self.entries[name]
        with open_regular(self.path / self.WEIGHTS) as file:
            file.seek(self._begins[name])
            data = bytearray(file.read(entry.num_bytes))
        if entry.kind.dtype is None:
            raise ValueError(f"{entry.kind.name} has no plain numbers")
        numbers = torch.frombuffer(data, dtype=entry.kind.dtype)
        return numbers.view(entry.shape).to(torch.float32)

    def _read_header(self) -> None:
        with open_regular(self.path / self.WEIGHTS) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise self._refused("its weights are truncated")
            if length > LARGEST_HEADER:
                raise self._refused(f"the header of its weights has {length:,} bytes")
            header = parse_json(file.read(length))
        where = f"the header of `{self.path / self.WEIGHTS}`"
        check_schema(header, {}, where, "name a folder of `arb export`")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            check_schema(entry, ENTRY, f"`{name}` in {where}", "name a folder of `arb export`")
        if not 1 <= self.keys["num_hidden_layers"] <= len(header):
            raise self._refused("it has no layers, or more layers than tensors")
        parts = self._parts()
        shapes = {name: entry["shape"] for name, entry in header.items()}
        if {name: list(part.shape) for name, part in parts.items()} != shapes:
            raise self._refused("its weights are not those that its configuration names")
        for theirs, entry in header.items():
            name, (begin, end) = parts[theirs].gguf, entry["data_offsets"]
            kind = TYPES[entry["dtype"].lower()]
            self.entries[name] = Entry(name, tuple(entry["shape"]), kind)
            self._begins[name] = 8 + length + begin
            fits = begin >= 0 and 8 + length + end <= size
            if not fits or self.entries[name].num_bytes != end - begin:
                raise self._refused("its weights are truncated, or were altered")

    def _parts(self) -> dict[str, Part]:
        """List the tensors that the configuration asks for, by what they are called here."""
        says = self.keys
        mixer = AttentionConfig(
            heads=says["num_attention_heads"],
            kv_heads=says["num_key_value_heads"],
            head_width=says["head_dim"],
            sub_norm="auto_map" in says,
        )
        channel = MLPConfig(width=says["intermediate_size"], sub_norm=mixer.sub_norm)
        blocks = (BlockConfig(mixer=mixer, channel=channel),) * says["num_hidden_layers"]
        stage = StageConfig(dim=says["hidden_size"], blocks=blocks)
        config = ModelConfig(ctx=says["sliding_window"], stages=(stage,))
        with torch.device("meta"):
            every = sources(LanguageModel(config))
        return {part.hugging_face: part for source in every for part in source.parts}

    def _refused(self, why: str) -> ArbError:
        return ArbError(f"`{self.path}`: refused: {why}", hint="name a folder of `arb export`")


def _tokenizer() -> dict[str, Any]:
    """Describe a tokenizer whose tokens are the 256 bytes, in their order."""
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    bytewise["use_regex"] = False
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }

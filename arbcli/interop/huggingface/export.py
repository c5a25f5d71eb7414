"""A folder that Transformers loads: weights, tokenizer, a card, and code where it is needed."""

import json
import math
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from arbcli.base.atomic_files import new_folder, write_bytes, write_file, write_json, write_text
from arbcli.base.errors import ArbError, os_errors
from arbcli.base.reading import read_json
from arbcli.base.run_files import COMPANIONS, CONFIG, TOKENIZER
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.data.special_tokens import GENERATION, SETTINGS, read_settings, stop_tokens
from arbcli.data.tokens import Tokenizer, byte_symbols
from arbcli.generation.load import Weights
from arbcli.interop.gguf.block_types import BF16, F16, F32, BlockType, encode_numbers
from arbcli.interop.gguf.container import Entry
from arbcli.interop.gguf.export import END
from arbcli.interop.huggingface import companions as companion_files
from arbcli.interop.huggingface import config_json, dense
from arbcli.interop.huggingface.card import model_card
from arbcli.interop.huggingface.folder import (
    PACKED,
    SCALE,
    WEIGHTS,
    WeightFolder,
    check_tensors,
    pack_rows,
)
from arbcli.interop.huggingface.remote import remote_code, remote_config, remote_tensors
from arbcli.kernels.codec.packed import scales_torch
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import TernaryTensor

CODE = Path(__file__).with_name("modeling_arb.py")
"""Module that Transformers runs for a model with sub-norms."""
TOKENIZER_CODE = CODE.with_name("tokenization_arb.py")
"""Module with the tokenizer of a Qwen 2, for which Transformers otherwise builds another one."""
TYPES = {"bf16": BF16, "f32": F32}
"""Types by their names in `--type`; bf16 represents every weight exactly."""
QUARTERS = BlockType(PACKED, -1, 4, 1)
"""Type of packed trits, four rows a byte, which GGUF does not have."""
NUMBERS = TYPES | {"f16": F16, PACKED.lower(): QUARTERS}
"""Dtypes of the weights of a folder."""
HINT = "name a folder of `arb export`, or of a model that `arb import` reads"
_DTYPES = {"BF16": "bfloat16", "F32": "float32"}


def write_folder(path: Path, weights: Weights, name: str, kind: str | None) -> str | None:
    """Write a model as a folder, whole or not at all.

    A model of dense blocks becomes one of an architecture that Transformers has, if possible. Any
    other keeps its packed weights, and the folder has code that reads them.

    Args:
        path: path of the folder to create.
        weights: the model.
        name: name of the model.
        kind: type of the weights, a name of `TYPES`; None is packed, or that of no error.

    Returns:
        The type of the weights; None if they are packed.

    Raises:
        ArbError: the model cannot be exported, or a file cannot be written.
    """
    config = weights.model.config
    companions = companion_files.companions_of(weights.path.parent, config)
    shape = dense.shape_of(config)
    packed = shape is None or (companions is None and not dense.fits_folder(shape))
    if packed and config.weights != "ternary":
        raise ArbError(
            "Transformers has no architecture for this model, and a baseline has no packed weights",
            "use `--to safetensors`",
        )
    if packed and kind:
        raise ArbError(
            "Transformers has no architecture for this model, whose weights stay packed",
            "leave `--type` out",
        )
    companion_files.tokenizer_of(weights)
    exact = "bf16" if config.weights == "ternary" else "f32"
    chosen = None if packed else TYPES[kind or exact]
    with os_errors("write", path, "check permissions and free space"), new_folder(path) as part:
        _write_files(part, weights, name, chosen, companions)
    return chosen.name if chosen else None


def _write_files(
    folder: Path, weights: Weights, name: str, kind: BlockType | None, companions: Path | None
) -> None:
    """Write all files; a `kind` of None packs the weights."""
    config = weights.model.config
    if kind is None:
        content = save(remote_tensors(weights.model), {"format": "pt"})
        write_bytes(folder / WEIGHTS, content)
        for file_name, text in remote_code(config).items():
            write_text(folder / file_name, text)
        _write_companions(folder, weights, remote_config(config))
    elif companions is None:
        _write_companions(folder, weights, _config(config, kind))
        if dense.known_shape(config).sub_norms:
            write_text(folder / CODE.name, CODE.read_text())
    else:
        companion_files.copy_companions(companions, folder)
    if tokenizer := companion_files.tokenizer_of(weights):
        write_bytes(folder / TOKENIZER, companion_files.read_companion(tokenizer))
    elif config.vocabulary == VOCABULARY:
        write_json(folder / TOKENIZER, _tokenizer())
    about: dict[str, Any] = {"arb.step": weights.checkpoint.step, "arb.origin": weights.origin}
    written = read_json(folder / CONFIG, {})
    if written["model_type"] == "qwen2":
        _keep_tokenizer(folder)
    written.pop("torch_dtype", None)  # the name of an earlier Transformers
    divides = False
    if written["model_type"] == config_json.BITNET:
        divides = config_json.divides_by_scale(written)
        about[config_json.QUANTIZATION] = written[config_json.QUANTIZATION] | {
            "quantization_mode": "offline"
        }
    if kind is not None:
        write_file(folder / WEIGHTS, lambda file: _write_weights(file, weights, kind, divides))
        about["dtype"] = _DTYPES[kind.name]
    write_json(folder / CONFIG, written | about)
    write_text(folder / "README.md", model_card(weights, name, packed=kind is None))


def _write_companions(folder: Path, weights: Weights, about: dict[str, Any]) -> None:
    """Write the settings of a model that was not imported, with its special tokens and template."""
    config, run = weights.model.config, weights.path.parent / COMPANIONS
    companion_files.copy_companions(run, folder)
    ends, names = read_settings(run, GENERATION), {}
    if path := companion_files.tokenizer_of(weights):
        stops = stop_tokens(Tokenizer.read(path), path)
        ends |= {"eos_token_id": stops} if stops else {}
    elif config.vocabulary == VOCABULARY:
        ends = {"eos_token_id": END, "pad_token_id": END}
        end = byte_symbols()[END]  # the character `end` of a text stays two bytes
        names = {"eos_token": end, "pad_token": end, "split_special_tokens": True}
    write_json(folder / CONFIG, about | ends)
    write_json(folder / GENERATION, ends)
    settings = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.ctx,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / SETTINGS, read_settings(run, SETTINGS) | settings)


def _keep_tokenizer(folder: Path) -> None:
    """Make Transformers read `tokenizer.json` as it is, unless the settings name that of Qwen 2.

    For a `model_type` of `qwen2` it ignores the class that they name, and builds a tokenizer with
    the pattern of Qwen and NFC. It does so only where they have no `auto_map`.
    """
    settings = read_settings(folder, SETTINGS)
    if str(settings.get("tokenizer_class")).startswith("Qwen2Tokenizer"):
        return
    classes = [f"{TOKENIZER_CODE.stem}.ArbTokenizer"] * 2
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": classes}
    }  # fmt: skip
    write_json(folder / SETTINGS, settings)
    write_text(folder / TOKENIZER_CODE.name, TOKENIZER_CODE.read_text())


def _write_weights(file: BufferedIOBase, weights: Weights, kind: BlockType, divides: bool) -> None:
    """Write a safetensors file, one tensor at a time.

    With `divides`, scales of trits are divisors, as `linear_class` decides.

    `save` of the package safetensors needs all of them in memory, and more than once: an export of
    67 million weights peaks at 941 MiB with it, and at 488 MiB here.
    """
    model_sources = list(dense.sources(weights.model))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0

    def declare(name: str, kind: BlockType, shape: tuple[int, ...]) -> None:
        nonlocal end
        begin, end = end, end + kind.num_bytes(math.prod(shape))
        stored = [shape[0] // kind.block_size, *shape[1:]]
        header[name] = {"dtype": kind.name, "shape": stored, "data_offsets": [begin, end]}

    for source in model_sources:
        for part in source.parts:
            has_scale = _scale(source, part) is not None
            declare(part.hugging_face, QUARTERS if has_scale else kind, part.shape)
            if has_scale:
                declare(part.hugging_face + SCALE, kind, (1,))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for source in model_sources:
        for part, weight in dense.read(source):
            data = [encode_numbers(part.hugging_face, weight, kind)]
            if (scale := _scale(source, part)) is not None:
                scale = 1 / scale if divides else scale
                data = [pack_rows(weight.sign()), scale.to(kind.dtype).view(torch.uint8)]
            for numbers in data:
                file.write(numbers.contiguous().view(-1).numpy().data)


def _scale(source: dense.Source, part: dense.Part) -> Tensor | None:
    """Return the scale, (1,) float32, of a part whose scales are all one; None of another."""
    tensor = source.tensor
    if not isinstance(tensor, TernaryTensor) or not tensor.fixed_scales:
        return None
    row = part.rows.start
    return scales_torch(*(digits[row, :1] for digits in (tensor.exponent, tensor.fraction)))


def _config(config: ModelConfig, kind: BlockType) -> dict[str, Any]:
    """Return the content of `config.json`; if supported, attention is limited to `ctx` bytes."""
    shape = dense.known_shape(config)
    architecture = shape.architecture
    values = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "attention_dropout": 0.0,
        "dtype": _DTYPES[kind.name],
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "hidden_size": shape.dim,
        "initializer_range": 0.02,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": config.ctx,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": config_json.rope_parameters(shape.rotary),
        "rope_theta": shape.rotary.base,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
    if architecture.model_type not in ("llama", config_json.BITNET):
        values["sliding_window"] = min(shape.windows[0] or config.ctx, config.ctx)
    if architecture.model_type in ("qwen2", "qwen3"):
        values |= {
            "layer_types": ["sliding_attention"] * shape.layers,
            "max_window_layers": 0,
            "use_sliding_window": True,
        }
    if shape.bitnet:
        about = {"quant_method": config_json.BITNET, "linear_class": "autobitlinear"}
        values |= {"hidden_act": "relu2", config_json.QUANTIZATION: about}
    if architecture.model_type in ("llama", "qwen3"):
        values["attention_bias"] = shape.bias
    if shape.sub_norms:
        module = CODE.stem
        values |= {
            "architectures": ["ArbForCausalLM"],
            "model_type": config_json.CUSTOM_CODE_TYPE,
            "auto_map": {
                "AutoConfig": f"{module}.ArbConfig",
                "AutoModelForCausalLM": f"{module}.ArbForCausalLM",
            },
        }
    return values


class ModelFolder:
    """A folder that is read; its tensors have the names of GGUF.

    Raises:
        ArbError: the model is not dense, or a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.keys: dict[str, Any] = read_json(path / CONFIG, {}, HINT)
        """Metadata of the model."""
        try:
            config = config_json.read_config(self.keys, f"`{path / CONFIG}`")
            self._folder = WeightFolder(path)
            with torch.device("meta"):
                model = LanguageModel(config)
            check_tensors(self._folder, model)
        except ArbError as error:
            raise ArbError(f"`{path}`: refused: {error}", error.hint) from None
        parts = [part for source in dense.sources(model) for part in source.parts]
        self._names = {part.gguf: part.hugging_face for part in parts}
        self.entries: dict[str, Entry] = {}
        """The tensors by name."""
        for part in parts:
            kind = NUMBERS[self._folder.tensors[part.hugging_face].dtype.lower()]
            self.entries[part.gguf] = Entry(part.gguf, part.shape, kind)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor by its GGUF name: float32 of the shape of its entry, on the CPU."""
        return self._folder.read(self._names[name])


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

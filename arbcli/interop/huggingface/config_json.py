"""Conversion of a Transformers `config.json` to a `ModelConfig`.

Every field has to be known: fields that affect the computation are read, fields that do not are in
`SILENT`, and unsupported ones must have the value in `ONLY`. Any other field is refused by name.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError
from arbcli.base.reading import has_type, read_json, shown
from arbcli.base.run_files import CONFIG
from arbcli.config.model import MAX_BLOCKS, BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.config.presets import set_symbol_directions
from arbcli.config.short_forms import PART_RULES, set_part_rules

HINT = "import a Llama, Mistral, Qwen 2 or Qwen 3, dense and not quantised, or a BitNet"
NAME = "_name_or_path"
"""Field with the name of the base model."""
CACHE_PREFIX = "models--"
"""Beginning of a folder's name in the cache of Hugging Face; `--` separates its parts."""
BIASES = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False),
          "qwen3": (False, False), "bitnet": (False, False)}  # fmt: skip
"""Whether queries, keys and values, and the output, have biases, by `model_type`."""
PACKED_TYPE = "arb"
"""A model of any parts, whose packed weights are read by custom code in Transformers."""
CUSTOM_CODE_TYPE = "arb_byte_lm"
"""A Qwen 3 with sub-norms, which `arb export --to hf` writes with custom code."""
SILENT = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_from_model_config", "_name_or_path", "arb.origin", "arb.step", "architectures",
    "attention_dropout", "attn_implementation", "attn_implementation_internal", "bos_token_id",
    "do_sample", "dtype", "eos_token_id", "initializer_range", "is_llama_config",
    "max_sequence_length", "max_window_layers", "neftune_noise_alpha", "output_attentions",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "return_dict",
    "return_dict_in_generate", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_cache",
}  # fmt: skip
"""Fields that do not affect the results of a trained model."""
ONLY: dict[str, Any] = {
    "is_decoder": False, "is_encoder_decoder": False, "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False, "use_mrope": False,
}  # fmt: skip
"""Required values of fields that a file may have."""
TRIT_TYPE, DIGIT_TYPE = "T128", "T32"
"""Scale types of weights that are imported as trits, and as all digits."""
BITNET = "bitnet"
QUANTIZATION = "quantization_config"
BITNET_MODES = {"bitlinear": ("offline",), "autobitlinear": ("offline", "online")}
"""Modes of BitNet's `quantization_config` by `linear_class`. `offline` weights are packed trits
with a scale; `online` weights are floats, and their mean magnitude is the scale."""
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""`scaling` of rotary positions by `rope_type`."""
FACTORS = {"factor": "factor", "original_max_position_embeddings": "original_ctx"}
ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": FACTORS | {"low_freq_factor": "low", "high_freq_factor": "high"},
    "yarn": FACTORS | {"beta_slow": "low", "beta_fast": "high"},
}
"""Names in `RotaryConfig` by field of `rope_parameters`, by `rope_type`."""


DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096}, "qwen2": {"max_window_layers": 28},
    "qwen3": {"max_window_layers": 28}, "bitnet": {"rope_theta": 5e5},
}  # fmt: skip
"""Values of missing fields in Transformers, where null is another value, by `model_type`."""


class _Fields:
    """Fields of a file, each of which is read once."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self.where = where

    def take(self, name: str, kind: Any, default: Any = ...) -> Any:
        """Return a field of a type; it is required without `default`."""
        value = self._left.pop(name, default)
        if value is ...:
            raise ArbError(f"{self.where} has no `{name}`", HINT)
        if value is not default and not has_type(value, kind):
            raise ArbError(f"{self.where} has no valid `{name}`: it is `{shown(value)}`", HINT)
        return value

    def refused(self, name: str, value: Any) -> ArbError:
        """Return the error of a value that is not supported."""
        return ArbError(
            f"{self.where}: `{name}` is `{shown(value)}`, which arb does not support", HINT
        )

    def end(self, ignored: Collection[str] = ()) -> None:
        """Raise an error for the first field that was not read, and is not ignored.

        Raises:
            ArbError: there is one, or a field is ignored that is known or missing.
        """
        for name in ignored:
            if name not in self._left:
                raise ArbError(
                    f"{self.where} has no field `{name}` that arb does not know",
                    f"leave `--ignore-field {name}` out",
                )
        for name in sorted(self._left.keys() - {*ignored}):
            value = shown(self._left[name])
            raise ArbError(
                f"{self.where}: `{name}`, which is `{value}`, is not a field that arb knows",
                f"{HINT}; if the field decides nothing that is computed, add"
                f" `--ignore-field {name}`",
            )


def model_name(folder: Path) -> str:
    """Return the name of a model's folder: `ORGANISATION/NAME` in a cache of Hugging Face."""
    for part in reversed(folder.absolute().parts):
        if part.startswith(CACHE_PREFIX):
            return "/".join(part.split("--")[1:])
    return folder.resolve().name


def read_folder_config(folder: Path, ignored: Collection[str] = (), **storage: Any) -> ModelConfig:
    """Read the configuration of the model in a folder: see `read_config`.

    Raises:
        ArbError: it cannot be read, or `read_config` refuses it.
    """
    path = folder / CONFIG
    return read_config(read_json(path, {}, HINT), f"`{path}`", ignored, **storage)


def read_config(
    values: Mapping[str, Any], where: str, ignored: Collection[str] = (), **storage: Any
) -> ModelConfig:
    """Convert the contents of a `config.json` to a model configuration.

    Args:
        values: contents of the file.
        where: name of the file, for errors.
        ignored: names of unknown fields that decide nothing.
        storage: fields of `ModelConfig` for the storage of weights, and rules of parts.

    Raises:
        ArbError: a field is missing, unknown, or has an unsupported value; the message has its
            name.
    """
    fields = _Fields({**DEFAULTS.get(str(values.get("model_type")), {}), **values}, where)
    model_type = fields.take("model_type", str)
    if model_type == PACKED_TYPE:
        raise ArbError(
            f"{where}: the weights were packed for Transformers, and arb does not read them",
            "name the run that they were exported from, or export it with `--to safetensors`",
        )
    if model_type not in (*BIASES, CUSTOM_CODE_TYPE):
        raise fields.refused("model_type", model_type)
    is_ours = model_type == CUSTOM_CODE_TYPE
    if is_ours:
        fields.take("auto_map", dict)
    is_bitnet = model_type == BITNET
    if is_bitnet:
        _check_quantization(fields)
    for name, only in (ONLY | {"hidden_act": "relu2" if is_bitnet else "silu"}).items():
        if (value := fields.take(name, object, only)) != only:
            raise fields.refused(name, value)
    ctx = fields.take("max_position_embeddings", int)
    heads = fields.take("num_attention_heads", int)
    layers = fields.take("num_hidden_layers", int)
    if not 1 <= layers <= MAX_BLOCKS:
        raise fields.refused("num_hidden_layers", layers)
    biases = BIASES.get(model_type, (False, False))
    if fields.take("attention_bias", bool, False):
        if model_type not in ("llama", "qwen3"):
            raise fields.refused("attention_bias", True)
        biases = True, True
    gains = model_type in ("qwen3", CUSTOM_CODE_TYPE)
    mixer = AttentionConfig(
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", int, heads if model_type == "llama" else ...),
        head_width=fields.take("head_dim", int, ... if gains else None),
        rotary=_rotary(fields, ctx),
        query_key_norm="none" if not gains else "unit" if is_ours else "gain",
        bias=biases[0],
        output_bias=biases[1],
        sub_norm=is_ours or is_bitnet,
        bitnet=is_bitnet,
    )
    width = fields.take("intermediate_size", int)
    channel = MLPConfig(width=width, sub_norm=mixer.sub_norm, bitnet=is_bitnet)
    blocks = tuple(
        BlockConfig(mixer=replace(mixer, window=window), channel=channel)
        for window in _windows(fields, model_type, layers, ctx)
    )
    rules = {name: storage.pop(name) for name in PART_RULES if name in storage}
    storage["scale_type"] = storage.get("scale_type") or (TRIT_TYPE if is_bitnet else DIGIT_TYPE)
    config = ModelConfig(
        ctx=ctx,
        stages=(StageConfig(dim=fields.take("hidden_size", int), blocks=blocks),),
        norm_gain=not is_ours,
        norm_eps=float(fields.take("rms_norm_eps", float)),
        vocabulary=fields.take("vocab_size", int),
        tied=fields.take("tie_word_embeddings", bool, False),
        **storage,
    )
    for name in SILENT:
        fields.take(name, object, None)
    fields.end(ignored)
    return set_part_rules(set_symbol_directions(config), **rules)


def divides_by_scale(values: Mapping[str, Any]) -> bool:
    """Return whether BitNet's layers divide by `weight_scale`, by the contents of `config.json`."""
    return values[QUANTIZATION].get("linear_class", "bitlinear") == "bitlinear"


def _check_quantization(fields: _Fields) -> None:
    """Check that a BitNet's weights are trits, and that nothing else is to be done to them."""
    inner = _Fields(fields.take(QUANTIZATION, dict), f"{fields.where}: `{QUANTIZATION}`")
    kind = inner.take("linear_class", str, "bitlinear")
    if kind not in BITNET_MODES:
        raise inner.refused("linear_class", kind)
    for name, known, otherwise in (
        ("quant_method", (BITNET,), ...), ("quantization_mode", BITNET_MODES[kind], "offline"),
        ("use_rms_norm", (False,), False), ("modules_to_not_convert", (None, ["lm_head"]), None),
    ):  # fmt: skip
        if (value := inner.take(name, object, otherwise)) not in known:
            raise inner.refused(name, value)
    inner.take("rms_norm_eps", float, None)
    inner.end()


def _windows(fields: _Fields, model_type: str, layers: int, ctx: int) -> list[int | None]:
    """Return the attention window of each layer; None is full attention."""
    window = fields.take("sliding_window", int, None)
    uses = fields.take("use_sliding_window", bool, model_type == "mistral")
    if model_type == "llama" and window is not None:
        raise fields.refused("sliding_window", window)
    kinds = fields.take("layer_types", list[str], None)
    if kinds is None:  # as an earlier Transformers wrote it
        first = fields.take("max_window_layers", int, 0) if model_type.startswith("qwen") else 0
        slides = [uses and index >= first for index in range(layers)]
    else:
        if len(kinds) != layers or not {*kinds} <= {"full_attention", "sliding_attention"}:
            raise fields.refused("layer_types", kinds)
        slides = [kind == "sliding_attention" for kind in kinds]
    if window is None and any(slides) and model_type != "mistral":
        raise fields.refused("sliding_window", None)
    is_full = window is None or window >= ctx
    return [window if slide and not is_full else None for slide in slides]


def _rotary(fields: _Fields, ctx: int) -> RotaryConfig:
    """Read the angles: of `rope_parameters`, or of `rope_theta` and `rope_scaling`."""
    theta = fields.take("rope_theta", float, PLAIN.base)
    old = fields.take("rope_scaling", dict, {})
    about = dict(fields.take("rope_parameters", dict, old))
    rope = _Fields(about, f"{fields.where}: `rope_parameters`")
    kind = rope.take("type", str, "default")
    kind = rope.take("rope_type", str, kind)
    if kind not in SCALINGS:
        raise rope.refused("rope_type", kind)
    values: dict[str, Any] = {}
    for field, name in ROPE_FIELDS[kind].items():
        number = int if name == "original_ctx" else float
        default = ctx if name == "original_ctx" else ... if name == "factor" else None
        value = rope.take(field, number, default)
        values[name] = value if value is None else number(value)
    base = rope.take("rope_theta", float, theta)
    if (share := rope.take("partial_rotary_factor", float, 1.0)) != 1:
        raise rope.refused("partial_rotary_factor", share)
    rope.end()
    return RotaryConfig(base=float(base), scaling=SCALINGS[kind], **values)


def rope_parameters(rotary: RotaryConfig) -> dict[str, Any]:
    """Write the angles as `rope_parameters`."""
    kind = next(kind for kind, name in SCALINGS.items() if name == rotary.scaling)
    values = {field: getattr(rotary, name) for field, name in ROPE_FIELDS[kind].items()}
    if kind in ("llama3", "yarn"):
        low, high = (field for field, name in ROPE_FIELDS[kind].items() if name in ("low", "high"))
        values[low], values[high] = rotary.bounds
    return {"rope_type": kind, "rope_theta": rotary.base} | values

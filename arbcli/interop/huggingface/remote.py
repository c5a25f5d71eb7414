"""Export of a model of any parts: its packed weights, and code in plain PyTorch that reads them.

Each part has its code in a module of its own, which its configuration names, and a folder gets the
modules that its model needs.
"""

import dataclasses
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from arbcli.config.model import ModelConfig
from arbcli.config.parts.base import every_part
from arbcli.families import BETWEEN_CODE, RESIDUAL_CODE
from arbcli.interop.huggingface.config_json import PACKED_TYPE
from arbcli.kernels.codec.decode_digits import integers
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.vector import ReadWeight
from arbcli.model.packed import StateModule, TernaryTensor

ENTRY = "modeling_arb"
"""Module that a folder's `config.json` names."""
MODEL = "arbcli.interop.huggingface.modeling_entry"
IMPORT = re.compile(r"^from (arbcli\.\S+) import", re.MULTILINE)


def remote_config(config: ModelConfig) -> dict[str, Any]:
    """Return the values that the exported code reads in `config.json`."""
    values = dataclasses.asdict(config)
    model = {name: values[name] for name in ("stages", "beside", "head", "composite", "tied")}
    for stage, ctx in zip(model["stages"], config.slots, strict=True):
        stage["ctx"] = ctx
    return {
        "architectures": ["ArbForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{ENTRY}.ArbConfig",
            "AutoModelForCausalLM": f"{ENTRY}.ArbForCausalLM",
        },
        "dtype": "float32",
        "group_size": config.group_size,
        "model": model,
        "model_type": PACKED_TYPE,
        "norm_eps": config.norm_eps,
        "norm_gain": config.norm_gain,
        "storage": "trits" if config.digits == "trit" else "digits",
        "symbol_storage": "trits" if config.symbol_spec(None).digits == "trit" else "digits",
        "symbols": config.symbols,
        "tie_word_embeddings": False,
        "vocab_size": config.vocabulary,
    }


def part_classes(config: ModelConfig) -> dict[str, str]:
    """Return the classes of a model's parts in plain PyTorch by kind: see `PartConfig.code`."""
    parts = every_part((config.stages, config.beside, config.composite))
    classes = {part.kind: part.code for part in parts if part.code}
    if any(stage.streams > 1 for stage in config.stages):
        classes["streams"] = RESIDUAL_CODE
    if config.main.memories or config.main.router:
        classes["between"] = BETWEEN_CODE
    return classes


def remote_code(config: ModelConfig) -> dict[str, str]:
    """Return the modules of a model's folder by the names of their files."""
    files: dict[str, str] = {}
    waiting = [(ENTRY, _entry(part_classes(config)))]
    while waiting:
        name, text = waiting.pop()
        others = {_file_name(other): other for other in IMPORT.findall(text)}
        files[f"{name}.py"] = IMPORT.sub(lambda of: f"from .{_file_name(of[1])} import", text)
        waiting += [(to, _source(of)) for to, of in others.items() if f"{to}.py" not in files]
    return files


def _source(module: str) -> str:
    package, _, name = module.rpartition(".")
    return files(package).joinpath(f"{name}.py").read_text()


def _file_name(module: str) -> str:
    """Name a module within a folder, such as `modeling_hnet` of `arbcli.families.hnet.modeling`."""
    *_, package, name = module.split(".")
    return f"{name}_{package}" if name == "modeling" else name


def _entry(classes: dict[str, str]) -> str:
    """Write the module that gives the core the classes of a model's parts, by kind."""
    names = {kind: code.split(":") for kind, code in classes.items()}
    imports = sorted({f"from {module} import {name}\n" for module, name in names.values()})
    table = "".join(f'    "{kind}": {name},\n' for kind, (_, name) in names.items())
    return _source(MODEL).replace(
        "\nPARTS: dict[str, Any] = {}", f"{''.join(imports)}\nPARTS: dict[str, Any] = {{\n{table}}}"
    )


def remote_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Return the tensors of a model by their names in the exported code.

    Matrices are `trits`, (N, row_bytes(K)) uint8, or `digits`, (N, K) int8, with `exponent` and
    `fraction` of the scales, (N, ceil(K / G)) int8. Vectors, (n,), and taps, (D, W), are decoded
    to bfloat16, which is exact. Other parts have their integer buffers, but for those that only
    steps read. Norms without gains have no tensors, and the head of later bytes is left out.
    """
    tensors: dict[str, Tensor] = {}
    between = {id(part) for memories in model._between for part in memories.children()}
    left_out = ("ahead", "head") if model.config.tied else ("ahead",)
    for child, part in model.named_children():
        if child not in left_out:
            prefix = f"between.{child}" if id(part) in between else child
            tensors |= {name: tensor.contiguous() for name, tensor in _tensors(part, prefix)}
    return tensors


def _tensors(part: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, module in part.named_modules(prefix=prefix):
        if not isinstance(module, StateModule):
            continue
        if not isinstance(module, TernaryTensor):
            for buffer in module.kinds.keys() - module.unread:
                yield f"{name}.{buffer}", getattr(module, buffer)
            continue
        if module.frozen:
            continue
        name = name.removesuffix(".weight")
        if isinstance(module, ReadWeight):
            weight = module.weight(torch.bfloat16)
            yield name, weight[:, 0] if module.in_features == 1 else weight
            continue
        packed, exponent = module.packed, module.exponent
        if packed.remainder is None:
            yield f"{name}.trits", packed.trits
        else:
            yield f"{name}.digits", integers(packed)
            exponent = exponent - (packed.unit.bit_length() - 1)
        fraction = packed.fraction
        yield f"{name}.exponent", exponent
        yield f"{name}.fraction", torch.zeros_like(exponent) if fraction is None else fraction

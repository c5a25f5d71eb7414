"""Models as TOML tables: stages with lists of blocks, and named blocks.

    [model]
    ctx = 4096

    [model.block.local]
    mixer = { kind = "attention", heads = 8, window = 128 }
    channel = { kind = "mlp", width = 1408 }

    [model.block.far]
    mixer = { kind = "compressed", heads = 12, head_width = 128, ratio = 4 }
    channel = { kind = "experts", experts = 16, top_k = 2, width = 512 }

    [[model.stage]]
    dim = 512
    before = "local*2"
    after = "local*2"
    chunking = { boundaries = "learned", length = 4 }

    [[model.stage]]
    dim = 768
    streams = 4
    blocks = "far*10"

Names and repetitions only exist in files; a configuration has complete lists of blocks. Missing
fields have their defaults; `"none"` removes a part that exists by default.
"""

import dataclasses
import itertools
import json
import re
from typing import Any

from arbcli.base.errors import ArbError, quoted
from arbcli.base.reading import shown
from arbcli.config.fields import NONE, build_dataclass
from arbcli.config.model import LISTS, MAX_BLOCKS, BlockConfig, Blocks, ModelConfig, StageConfig
from arbcli.config.training import model_word, resolve_names
from arbcli.model.rules import DIRECTION, RULES

MAX_STAGES = 64
"""Maximum number of stages in a file; models are limited further."""


def model_from_toml(values: dict[str, Any], where: str) -> ModelConfig:
    """Build a model from a TOML table.

    Args:
        values: the table `model`.
        where: name of the file, for errors.

    Raises:
        ArbError: a field is missing, unknown, of the wrong type, or invalid.
    """
    fields = dict(values)
    stages, blocks = fields.pop("stage", None), fields.pop("block", {})
    if not isinstance(stages, list) or not isinstance(blocks, dict) or len(stages) > MAX_STAGES:
        raise ArbError(
            f"`{where}` has no list of stages in `[[model.stage]]`",
            "write a stage with `dim` and `blocks`",
        )
    fields = model_fields(fields, where)
    rule = fields.get("rule")
    if isinstance(rule, str) and rule in RULES:
        fields.setdefault("direction", DIRECTION[rule])
    try:
        if "stages" in fields:
            raise TypeError("`model` has no field `stages`, which files call `stage`")
        named = {
            name: build_dataclass(BlockConfig, block, f"model.block.{shown(name)}")
            for name, block in blocks.items()
        }
        fields["stages"] = [
            _stage(stage, named, f"model.stage[{index}]") for index, stage in enumerate(stages)
        ]
        return build_dataclass(ModelConfig, fields, "model")
    except TypeError as error:
        raise ArbError(
            f"`{where}`: {error}", "see docs/models.md for the fields of a model"
        ) from None


def model_fields(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Replace the words of `--weights` and `--optimizer` in a table `model` by fields.

    Raises:
        ArbError: words and fields contradict each other.
    """
    if {"optimizer", "direction"} <= values.keys():
        raise ArbError(
            f"`{where}` has `model.optimizer` and `model.direction`, which are the same",
            "leave one of them out",
        )
    storage: dict[str, Any] = {
        "direction" if name == "optimizer" else name: values[name]
        for name in ("weights", "digits", "optimizer", "direction")
        if name in values
    }
    others = {name: value for name, value in values.items() if name not in (*storage, "optimizer")}
    return others | resolve_names(storage)


def _stage(stage: Any, blocks: dict[str, BlockConfig], where: str) -> StageConfig:
    if not isinstance(stage, dict):
        raise ArbError(f"`{where}` is `{shown(stage)}`", "write it as `[[model.stage]]`")
    lists = {
        name: _expand(stage[name], blocks, f"{where}.{name}") for name in LISTS if name in stage
    }
    return build_dataclass(StageConfig, stage | lists, where)


def _expand(text: Any, blocks: dict[str, BlockConfig], where: str) -> Blocks:
    """Return the blocks of a list such as `first*3 near far`."""
    if not isinstance(text, str):
        raise ArbError(f"`{where}` is `{shown(text)}`", 'name blocks, as in "local*2 far"')
    expanded: list[BlockConfig] = []
    for word in text.split():
        name, times, count = word.partition("*")
        if name not in blocks:
            known = quoted(blocks) or "none"
            raise ArbError(
                f"`{where}` names the block `{shown(name)}`",
                f"the blocks of `[model.block]` are: {known}",
            )
        number = int(count) if re.fullmatch("[0-9]{1,4}", count) else 0 if times else 1
        if not 1 <= number <= MAX_BLOCKS - len(expanded):
            raise ArbError(f"`{where}` repeats `{shown(word)}`", f"use 1 to {MAX_BLOCKS} blocks")
        expanded += [blocks[name]] * number
    return tuple(expanded)


def model_lines(config: ModelConfig) -> list[str]:
    """Return a model as lines of TOML for `model_from_toml`."""
    names = _block_names(config)
    values = given_fields(config, without=("stages", "weights", "digits", "direction"))
    if weights := model_word("--weights", config):
        values["weights"] = weights
    else:  # in the middle of a fade
        values["digits"] = config.digits
    if config.weights == "ternary" and config.direction:
        values["optimizer"] = model_word("--optimizer", config)
    elif config.direction != DIRECTION[config.rule]:
        values["direction"] = config.direction
    lines = ["[model]", *(f"{name} = {to_toml(value)}" for name, value in values.items())]
    for block, name in names.items():
        lines += ["", f"[model.block.{name}]"]
        lines += [f"{field} = {to_toml(value)}" for field, value in given_fields(block).items()]
    for stage in config.stages:
        lines += ["", "[[model.stage]]"]
        for field, value in given_fields(stage).items():
            text = _compact(getattr(stage, field), names) if field in LISTS else value
            lines.append(f"{field} = {to_toml(text)}")
    return lines


def _block_names(config: ModelConfig) -> dict[BlockConfig, str]:
    """Return names of the distinct blocks, from the kinds of their parts."""
    names: dict[BlockConfig, str] = {}
    for _, block in config.blocks():
        if block not in names:
            base = "-".join(part.kind for part in block.parts)
            number = sum(name.rstrip("0123456789") == base for name in names.values())
            names[block] = f"{base}{number + 1}" if number else base
    return names


def _compact(blocks: Blocks, names: dict[BlockConfig, str]) -> str:
    """Return a list of blocks as text such as `first*3 near far`."""
    words = []
    for name, group in itertools.groupby(names[block] for block in blocks):
        count = len([*group])
        words.append(name if count == 1 else f"{name}*{count}")
    return " ".join(words)


def given_fields(config: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields that differ from their defaults as plain values, with the kind first."""
    fields = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in without and (value != field.default or not field.init):
            fields[field.name] = _plain(value)
    return fields


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return given_fields(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def to_toml(value: Any) -> str:
    """Return a value as TOML."""
    if value is None:
        value = NONE
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {to_toml(part)}' for name, part in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    text = json.dumps(value, ensure_ascii=False)  # JSON strings are valid TOML, except for DEL
    return text.replace("\x7f", "\\u007f")

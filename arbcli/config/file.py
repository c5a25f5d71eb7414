"""Configurations of runs as files that a person writes: TOML, or the `config.json` of a run.

    preset = "small"
    data = ["book.txt"]
    steps = 2000

    [model]
    ctx = 512

What is not there has its default. The names are the fields of `TrainConfig`, and below `[model]`
those of the model's configuration.
"""

import dataclasses
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from arbcli.config.presets import KINDS, PRESETS
from arbcli.config.training import OPTIMIZERS, TrainConfig, train_config_dict
from arbcli.errors import ArbError

TOP = {field.name: field.type for field in dataclasses.fields(TrainConfig) if field.name != "model"}
"""Types of the settings of a run, by name."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings that a file gives, as `new_config` takes them.

    Args:
        path: of a TOML file, or of a `config.json`.

    Raises:
        ArbError: it cannot be read, or names what is no setting or has another type.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ArbError(
            f"cannot read `{path}`: {error.strerror}", hint="check the path and its permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ArbError(
            f"`{path}` is no {kind}: {error}", hint="write lines such as `steps = 100`"
        ) from None
    if path.suffix == ".json" and isinstance(values, dict):
        values = values.get("config", values)  # what else a run's has is of what it was made on
    if not isinstance(values, dict) or not isinstance(values.get("model", {}), dict):
        raise ArbError(
            f"`{path}` has no settings by name", hint="write lines such as `steps = 100`"
        )
    model = dict(values.pop("model", {}))
    kind = model.pop("kind", None)
    settings: dict[str, Any] = {}
    if kind is not None and "preset" not in values:  # one of that kind, whose sizes are replaced
        found = (name for name, known in PRESETS.items() if kind == known.kind)
        values["preset"] = next(found, kind)
    if "preset" in values:
        settings["preset"] = values.pop("preset")
        if not isinstance(settings["preset"], str):
            raise ArbError(
                f"`preset` of `{path}` is {settings['preset']!r}", hint="name a preset in quotes"
            )
    of_models = {f.name: f.type for known in KINDS.values() for f in dataclasses.fields(known)}
    for found, types, where in ((values, TOP, ""), (model, of_models, "model.")):
        for name, value in found.items():
            if name not in types:
                raise _unknown(path, where, name, types, of_models)
            if value is not None:  # JSON has null where nothing was given
                settings[name] = _checked(path, where + name, value, types[name])
    if settings.get("optimizer") == OPTIMIZERS["ternary"][0]:  # follows from the weights
        del settings["optimizer"]
    shape = PRESETS.get(settings.get("preset", "tiny"))
    if shape is not None and settings.get("weights", shape.weights) != "ternary":
        for name in ("rule", "direction"):  # a twin is written with its preset's, and takes none
            if settings.get(name) == getattr(shape, name):
                settings.pop(name, None)
    return settings


def settings_text(config: TrainConfig, preset: str) -> str:
    """Write a configuration as TOML that `read_settings` reads.

    Args:
        config: what to write.
        preset: name of the one that it was made of.
    """
    values = train_config_dict(config)
    model = values.pop("model")
    lines = [f"preset = {_toml(preset)}", *_lines(values), "", "[model]", *_lines(model)]
    return "\n".join(lines) + "\n"


def _lines(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    text = json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML one, but for DEL
    return text.replace("\x7f", "\\u007f")


def _unknown(
    path: Path, where: str, name: str, known: Iterable[str], of_models: Iterable[str]
) -> ArbError:
    if not where and name in of_models:
        return ArbError(
            f"`{name}` in `{path}` is a setting of the model", hint="write it below `[model]`"
        )
    names = ", ".join(f"`{setting}`" for setting in known)
    return ArbError(f"`{path}` has no setting `{where}{name}`", hint=f"choose one of: {names}")


def _checked(path: Path, name: str, value: Any, wanted: Any) -> Any:
    """Bring a value to the type of its setting: lists are tuples, whole numbers may be floats.

    Raises:
        ArbError: it has another type.
    """
    choices = get_args(wanted) if get_origin(wanted) is UnionType else (wanted,)
    for choice in choices:
        if get_origin(choice) is tuple and isinstance(value, list):
            element = get_args(choice)[0]
            if all(type(part) is element for part in value):
                return tuple(value)
        if choice is float and type(value) is int:
            return float(value)
        if type(value) is choice:
            return value
    names = " or ".join(getattr(c, "__name__", str(c)) for c in choices if c is not type(None))
    raise ArbError(f"`{name}` in `{path}` is {value!r}", hint=f"it takes a value of type {names}")

"""Configuration files of runs: TOML, or the `config.json` of a run.

    preset = "small"
    data = ["book.txt"]
    steps = 2000

    [model]
    ctx = 512

Missing settings have their defaults. Names are the fields of `TrainConfig`, and below `[model]` the
arguments of the preset's short form, or a complete model: see `arbcli.config.model_file`.
"""

import dataclasses
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError, quoted
from arbcli.base.reading import read_json, read_toml, shown
from arbcli.config.model import ModelConfig
from arbcli.config.model_file import model_fields, model_from_toml, model_lines, to_toml
from arbcli.config.presets import config_from_dict
from arbcli.config.settings import as_type, plain_type
from arbcli.config.short_forms import ARGUMENTS
from arbcli.config.training import (
    OPTIMIZERS,
    TrainConfig,
    canonical_name,
    default_reduction,
    resolve_names,
    train_config_dict,
)

TOP = {
    field.name: plain_type(field.type)
    for field in dataclasses.fields(TrainConfig)
    if field.name != "model"
}
"""Types of the settings of a run, by name."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings in a file, as keyword arguments of `new_config`.

    Args:
        path: path of a TOML file or a `config.json`.

    Raises:
        ArbError: the file cannot be read, or a setting is unknown or has the wrong type.
    """
    hint = "write lines such as `steps = 100`"
    values = read_json(path, hint=hint) if path.suffix == ".json" else read_toml(path, hint)
    if path.suffix == ".json" and isinstance(values, dict):
        values = values.get("config", values)  # the other fields of a run's file describe its data
    if not isinstance(values, dict) or not isinstance(values.get("model", {}), dict):
        raise ArbError(f"`{path}` has no settings by name", hint)
    model = dict(values.pop("model", {}))
    settings: dict[str, Any] = {}
    if {"stage", "stages", "kind"} & model.keys():  # a complete model, from TOML or a run
        if "preset" in values:
            raise ArbError(f"`{path}` has a preset and a whole model", "leave one of them out")
        settings["preset"], model = _whole_model(path, model), {}
    model = model_fields(model, str(path))
    if "preset" in values:
        settings["preset"] = values.pop("preset")
        if not isinstance(settings["preset"], str):
            preset = shown(settings["preset"])
            raise ArbError(f"`preset` of `{path}` is `{preset}`", "name a preset in quotes")
    for table, known, where in ((values, TOP, ""), (model, ARGUMENTS, "model.")):
        for spelling, value in table.items():
            name = canonical_name(spelling)
            if name not in known:
                raise _unknown(path, where, name, known)
            if value is not None:  # JSON has null where nothing was given
                kind = TOP[name] if known is TOP else plain_type(ARGUMENTS[name].annotation)
                settings[spelling] = as_type(value, kind, f"`{where}{name}` in `{path}`")
    if values.get("reduce_dtype", "") is None and default_reduction(settings.get("accum", 1)):
        settings["reduce_dtype"] = "none"  # not the default
    if settings.get("optimizer") == OPTIMIZERS["ternary"][0]:  # follows from the weights
        del settings["optimizer"]
    return resolve_names(settings)


def read_model(path: Path) -> ModelConfig:
    """Read the complete model in a file of settings; other settings are ignored.

    Raises:
        ArbError: the file cannot be read, or has no complete and valid model.
    """
    model = read_settings(path).get("preset")
    if not isinstance(model, ModelConfig):
        raise ArbError(
            f"`{path}` has no whole model",
            "write stages as `[[model.stage]]`, as `settings_text` does",
        )
    return model


def _whole_model(path: Path, values: dict[str, Any]) -> ModelConfig:
    """Build a model from its fields.

    Raises:
        ArbError: the fields are invalid.
    """
    if "stage" in values:
        return model_from_toml(values, str(path))
    try:
        return config_from_dict(values)
    except TypeError as error:
        raise ArbError(
            f"`{path}` has no model of this version of arb: {error}",
            "write stages as `[[model.stage]]`, or name the file of a run of this version",
        ) from None


def settings_text(config: TrainConfig, without: Collection[str] = ()) -> str:
    """Return a configuration as TOML for `read_settings`, with a complete model.

    Args:
        config: the configuration.
        without: names of settings to leave out, such as those of this machine.
    """
    values = train_config_dict(config)
    values = {name: value for name, value in values.items() if name not in ("model", *without)}
    settings = {name: value for name, value in values.items() if value is not None}
    if settings["optimizer"] == OPTIMIZERS["ternary"][0]:  # that of the model
        del settings["optimizer"]
    if config.reduce_dtype is None and default_reduction(config.accum):
        settings["reduce_dtype"] = "none"
    lines = [f"{name} = {to_toml(value)}" for name, value in settings.items()]
    return "\n".join([*lines, "", *model_lines(config.model)]) + "\n"


def _unknown(path: Path, where: str, name: str, known: Iterable[str]) -> ArbError:
    if not where and name in ARGUMENTS:
        return ArbError(
            f"`{name}` in `{path}` is a setting of the model", "write it below `[model]`"
        )
    if where and name in {*(field.name for field in dataclasses.fields(ModelConfig)), "block"}:
        return ArbError(
            f"`{path}` has `{where}{name}`, which only a model with stages has",
            "write the stages as `[[model.stage]]`, see docs/models.md",
        )
    return ArbError(f"`{path}` has no setting `{where}{name}`", f"choose one of: {quoted(known)}")


def read_assignments(texts: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read assignments of the form FIELD=VALUE, with the value as TOML or a plain word.

    Returns:
        Settings by name, and fields of the model by path, for `change_fields`.

    Raises:
        ArbError: a text assigns nothing, assigns twice, or a setting has the wrong type.
    """
    settings: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for text in texts:
        spelling, equals, word = text.partition("=")
        spelling = spelling.strip().removeprefix("model.")
        if not spelling or not equals:
            raise ArbError(f"`{shown(text)}` sets nothing", "write it as FIELD=VALUE")
        try:
            value = tomllib.loads(f"value = {word}")["value"]
        except tomllib.TOMLDecodeError:
            value = word.strip()
        name = canonical_name(spelling.replace("-", "_"))
        known = name in TOP or name in ARGUMENTS
        if (name if known else spelling) in (settings if known else fields):
            raise ArbError(f"`{shown(spelling)}` is set twice", "set it once")
        if known:
            kind = TOP[name] if name in TOP else plain_type(ARGUMENTS[name].annotation)
            settings[name] = as_type(value, kind, f"`{name}`")
        else:
            fields[spelling] = value
    return settings, fields

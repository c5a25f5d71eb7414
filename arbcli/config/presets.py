"""Presets, and configurations of models from saved dictionaries."""

import dataclasses
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from arbcli.base.errors import ArbError, quoted
from arbcli.base.lazy import LazyMapping
from arbcli.base.reading import shown
from arbcli.config import short_forms
from arbcli.config.fields import build_dataclass, change_fields
from arbcli.config.kinds import MIXERS
from arbcli.config.layer_spec import is_chunked
from arbcli.config.model import ModelConfig
from arbcli.config.settings import check_choice
from arbcli.families import FAMILIES
from arbcli.model.rules import DIRECTION, RULES

ATTENTIONS = tuple(form for form in short_forms.FORMS if form == "dense" or form in MIXERS)
"""Forms that the option `attention` chooses between, named by their token mixers."""


class ShortForm(NamedTuple):
    """A model as a short form and its arguments."""

    form: str
    """Name in `FORMS`."""
    values: dict[str, Any]
    """Arguments of the form."""


DENSE: dict[str, dict[str, Any]] = {
    "tiny": dict(dim=256, layers=4, heads=4, ffn=704, ctx=64),
    "small": dict(dim=384, layers=6, heads=6, ffn=1024, ctx=256),
    "base": dict(dim=768, layers=12, heads=12, ffn=2048, ctx=1024),
    "1b": dict(dim=2048, layers=24, heads=16, ffn=5632, ctx=2048),
}
"""Presets of the form `dense`."""


def _short_form(name: str) -> ShortForm:
    """Return the short form of a preset, and import its family if it has one."""
    if name in DENSE:
        return ShortForm("dense", DENSE[name])
    form = next(family.form for family in FAMILIES.values() if name in family.presets)
    assert form is not None, "a family with presets has a form"
    return ShortForm(
        form, import_module(f"arbcli.families.{short_forms.family_of(form)}.presets").PRESETS[name]
    )


SHORT_FORMS = LazyMapping(
    (*DENSE, *(name for family in FAMILIES.values() for name in family.presets)), _short_form
)
"""Short forms of the presets, by name."""
PRESETS = LazyMapping(SHORT_FORMS, lambda name: short_forms.assemble(*SHORT_FORMS[name]))
"""Models of the presets, by name."""


def check_preset(name: str) -> None:
    """Check that a preset has this name.

    Raises:
        ArbError: there is no such preset.
    """
    if name not in PRESETS:
        hint = f"choose one of: {quoted(PRESETS)}"
        if name.endswith(".toml"):
            hint = "read the model of a file with `--model FILE`"
        raise ArbError(f"no preset is named `{name}`", hint)


def preset(name: str, **overrides: object) -> ModelConfig:
    """Build the configuration of a preset, with the overrides that are not None.

    If the rule is overridden and the direction is not, the direction is the new rule's default.

    Args:
        name: name of the preset.
        overrides: arguments of its short form; `attention` may be one of `ATTENTIONS`, or a word
            that the form adapts.

    Raises:
        ArbError: there is no such preset, or a value is invalid.
    """
    check_preset(name)
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    form, values = SHORT_FORMS[name]
    changes = short_forms.FORMS[form].adapt(changes)
    if isinstance(changes.get("attention"), str):
        check_choice("attention", changes["attention"], ATTENTIONS)
        if form in ATTENTIONS:  # all others are refused below
            form = changes.pop("attention")
    known = short_forms.arguments(form)
    if others := [key for key in changes if key not in known]:
        word = isinstance(changes[others[0]], str) and others[0] == "attention"
        able = (
            known
            for known, (form, _) in SHORT_FORMS.items()
            if (form in ATTENTIONS if word else others[0] in short_forms.arguments(form))
        )
        having = " or ".join(f"`{known}`" for known in able)
        raise ArbError(
            f"the preset `{name}` has no such part: {quoted(others)}",
            f"use it with {having}" if having else None,
            fields=tuple(others),
        )
    own_rule = values.get("rule", known["rule"].default)
    _set_direction(changes, own_rule, values.get("direction", known["direction"].default))
    shared = {key: value for key, value in values.items() if key in known}
    return short_forms.assemble(form, shared | changes)


def assembled(
    model: str | ModelConfig, *, fields: Mapping[str, Any] | None = None, **overrides: object
) -> ModelConfig:
    """Build a preset with overrides, or change a model's storage: see `preset`, `change_storage`.

    Args:
        model: name of a preset, or the configuration of a model.
        fields: further fields by path: see `change_fields`.
        overrides: arguments of the preset's short form, or storage.

    Raises:
        ArbError: there is no such preset or field, or a value is invalid.
    """
    if isinstance(model, str):
        config = preset(model, **overrides)
    else:
        config = change_storage(model, **overrides)
    return change_fields(config, fields) if fields else config


def change_storage(config: ModelConfig, **overrides: object) -> ModelConfig:
    """Return a model with other storage of its weights, or another context.

    Args:
        config: configuration of the model.
        overrides: `ctx`, fields of `STORAGE`, and `PART_RULES`; None keeps the current value.

    Raises:
        ArbError: a value is invalid, or only applies to presets.
    """
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    rules = {name: changes.pop(name) for name in short_forms.PART_RULES if name in changes}
    if others := [key for key in changes if key not in ("ctx", *short_forms.STORAGE)]:
        raise ArbError(
            f"{quoted(others)} only applies to a preset",
            "leave it out, or change the model itself",
            fields=tuple(others),
        )
    _set_direction(changes, config.rule, config.direction)
    return short_forms.set_part_rules(dataclasses.replace(config, **changes), **rules)


SYMBOL_DIRECTIONS = ("embedding_direction", "head_direction")
"""Settings whose defaults depend on `direction`."""


def reset_symbol_directions(config: ModelConfig, kept: Collection[str]) -> ModelConfig:
    """Choose the directions of embedding and head anew, except for the settings in `kept`."""
    changes: dict[str, Any] = {name: None for name in SYMBOL_DIRECTIONS if name not in kept}
    return set_symbol_directions(dataclasses.replace(config, **changes))


def set_symbol_directions(config: ModelConfig) -> ModelConfig:
    """Choose factored steps for the embedding and the head of a large vocabulary.

    Only where the model's own are orthogonal, and where no others are chosen: chunks of such a
    matrix learn less from orthogonal steps, which are also slower.
    """
    orthogonal = config.weights == "ternary" and config.direction == "orthogonal"
    if not (orthogonal and is_chunked(config.vocabulary)):
        return config
    has_head = not (config.tied or config.composite)
    return dataclasses.replace(
        config,
        embedding_direction=config.embedding_direction or "factored",
        head_direction=(config.head_direction or "factored") if has_head else None,
    )


def _set_direction(changes: dict[str, Any], own_rule: str, own_direction: str | None) -> None:
    """Set rule and direction in `changes` to their defaults if they are missing."""
    rule_name = changes.setdefault("rule", own_rule)
    if rule_name not in RULES:
        return
    direction = DIRECTION[rule_name]
    if direction is None and "direction" in changes:
        raise ArbError(
            f"the rule `{rule_name}` takes no direction",
            "leave `direction` out",
            fields=("direction",),
        )
    changes.setdefault("direction", own_direction if rule_name == own_rule else direction)


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """Build the configuration of a model from parsed JSON or TOML.

    Args:
        values: fields of `ModelConfig`; or, in files of earlier versions, the arguments of a short
            form and its name as `kind`. Without `kind`, the first form that has all arguments.

    Raises:
        TypeError: fields do not match this version.
        ArbError: values are invalid.
    """
    if not isinstance(values, dict):
        raise TypeError(f"a model is `{shown(values)}`, not an object")
    if "stages" in values:
        return build_dataclass(ModelConfig, values, "model")
    fields = {name: value for name, value in values.items() if name != "kind"}
    for name in short_forms.FORMS:
        if values.get("kind", name) == name and all(
            field in short_forms.arguments(name) for field in fields
        ):
            return short_forms.assemble(name, fields)
    raise TypeError(f"no kind of model has the fields {', '.join(values)}")

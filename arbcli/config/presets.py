"""Presets, and configurations of models from saved dictionaries."""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

from arbcli.base.errors import ArbError, quoted
from arbcli.base.reading import shown
from arbcli.config.checks import check_choice
from arbcli.config.kinds import BESIDE, BOOKS, CHANNELS, MIXERS
from arbcli.config.model import MOST_BLOCKS, ModelConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.settings import plain_type
from arbcli.config.short_forms import (
    FAMILIES,
    PART_RULES,
    STORAGE,
    arguments,
    assemble,
    with_part_rules,
)
from arbcli.model.rules import DIRECTION, RULES

ATTENTIONS = ("dense", "compressed")
"""Values of `attention` that choose between the families `dense` and `compressed`."""
GRAPH_ATTENTIONS = ("latent", "none")
"""Values of `attention` in the family `graph`."""


class ShortForm(NamedTuple):
    """A model as a family and its arguments."""

    family: str
    """Name in `FAMILIES`."""
    values: dict[str, Any]
    """Arguments of the family."""


SHORT_FORMS = {
    "tiny": ShortForm("dense", dict(dim=256, layers=4, heads=4, ffn=704, ctx=64)),
    "small": ShortForm("dense", dict(dim=384, layers=6, heads=6, ffn=1024, ctx=256)),
    "base": ShortForm("dense", dict(dim=768, layers=12, heads=12, ffn=2048, ctx=1024)),
    "1b": ShortForm("dense", dict(dim=2048, layers=24, heads=16, ffn=5632, ctx=2048)),
    "arb-long": ShortForm("compressed", dict(
        dim=768, layers=12, heads=12, ffn=1920, ctx=16384, head_width=128, rotary=64,
    )),
    "arb-deep-small": ShortForm("compressed", dict(
        dim=512, layers=8, heads=8, ffn=256, ctx=4096, head_width=64, streams=4, window=128,
        experts=16, moe_gate="softplus", hash_layers=2, shared_expert=True, moe_clamp=True,
    )),
    "arb-deep": ShortForm("compressed", dict(
        dim=1024, layers=61, heads=16, ffn=256, ctx=4096, head_width=128, streams=4, window=128,
        experts=16, moe_gate="softplus", hash_layers=3, shared_expert=True, moe_clamp=True,
    )),
    "arb-tiny": ShortForm("graph", dict(
        dim=256, layers=4, heads=4, ffn=832, ctx=256, rule="moment",
        latent=128, rotary=32, ngram_rows=16384, ngram_dim=64, key_dim=32,
        codes=(64, 64), code_dim=64, code_heads=2, knowledge=(128, 128), knowledge_dim=32,
        knowledge_heads=4, top_k=4, experts=8, expert_dim=160, expert_ffn=160, gate_dim=32,
        adapter_rank=16, edges=(4096, 4), head_ffn=416, moe=False, graph=False,
    )),
    "arb-3b": ShortForm("graph", dict(
        dim=2560, layers=20, heads=20, ffn=10240, ctx=64, rule="nibble", direction="factored",
        latent=512, rotary=32, ngram_rows=65987, ngram_dim=512, key_dim=128,
        codes=(512, 256), code_dim=1024, code_heads=4, knowledge=(2500, 2000), knowledge_dim=64,
        knowledge_heads=16, top_k=8, experts=56, expert_dim=1280, expert_ffn=2560, gate_dim=224,
        adapter_rank=64, edges=(32768, 4), head_ffn=17600,
    )),
    "hnet-tiny": ShortForm("hnet", dict(
        dim=256, layers=3, heads=4, ffn=704, ctx=256, outer_dim=(128,), outer_layers=(1,),
        outer_heads=(4,), outer_ffn=(352,), chunk_length=(4,), window=32,
    )),
    "hnet-small": ShortForm("hnet", dict(
        dim=384, layers=5, heads=6, ffn=1024, ctx=1024, outer_dim=(256,), outer_layers=(1,),
        outer_heads=(4,), outer_ffn=(704,), chunk_length=(4,), window=128,
    )),
    "hnet-base": ShortForm("hnet", dict(
        dim=768, layers=10, heads=12, ffn=2048, ctx=4096, outer_dim=(512,), outer_layers=(2,),
        outer_heads=(8,), outer_ffn=(1408,), chunk_length=(4,), window=128,
    )),
    "hnet-every": ShortForm("hnet", dict(
        dim=768, layers=10, heads=12, ffn=2048, ctx=4096, outer_dim=(512,), outer_layers=(2,),
        outer_heads=(8,), outer_ffn=(1408,), chunk_length=(32,), window=128, boundaries="every",
    )),
    "hnet-long": ShortForm("hnet", dict(
        dim=768, layers=10, heads=12, ffn=2048, ctx=16384, outer_dim=(512,), outer_layers=(2,),
        outer_heads=(8,), outer_ffn=(1408,), chunk_length=(32,), window=128, boundaries="every",
    )),
    "hnet-code": ShortForm("hnet", dict(
        dim=768, layers=10, heads=12, ffn=2048, ctx=16384, outer_dim=(512,), outer_layers=(2,),
        outer_heads=(8,), outer_ffn=(1408,), chunk_length=(128,), window=128, boundaries="every",
    )),
    "hnet-two-stage": ShortForm("hnet", dict(
        dim=768, layers=10, heads=12, ffn=2048, ctx=4096, outer_dim=(384, 512),
        outer_layers=(2, 2), outer_heads=(6, 8), outer_ffn=(1024, 1408), chunk_length=(3, 3),
        window=128,
    )),
}  # fmt: skip
"""Short forms of the presets, by name."""
PRESETS = {name: assemble(*short) for name, short in SHORT_FORMS.items()}
"""Models of the presets, by name."""


def check_preset(name: str) -> None:
    """Check that a preset has this name.

    Raises:
        ArbError: there is no such preset.
    """
    if name not in PRESETS:
        raise ArbError(f"no preset is named `{name}`", hint=f"choose one of: {quoted(PRESETS)}")


def preset(name: str, **overrides: object) -> ModelConfig:
    """Build the configuration of a preset, with the overrides that are not None.

    If the rule is overridden and the direction is not, the direction is the new rule's default.

    Args:
        name: name of the preset.
        overrides: arguments of its short form; `attention` may be one of `ATTENTIONS` or
            `GRAPH_ATTENTIONS`.

    Raises:
        ArbError: there is no such preset, or a value is invalid.
    """
    check_preset(name)
    given = {key: value for key, value in overrides.items() if value is not None}
    family, values = SHORT_FORMS[name]
    if isinstance(given.get("attention"), str):
        family, given = _with_attention(family, given)
    if family == "graph" and "top_k_experts" in given:
        given = _with_iterated_top_k(given)
    known = arguments(family)
    if others := [key for key in given if key not in known]:
        able = (k for k, v in SHORT_FORMS.items() if others[0] in arguments(v.family))
        having = " or ".join(f"`{known}`" for known in able)
        raise ArbError(
            f"the preset `{name}` has no such part: {quoted(others)}",
            hint=f"use it with {having}" if having else None,
            fields=tuple(others),
        )
    own_rule = values.get("rule", known["rule"].default)
    _set_direction(given, own_rule, values.get("direction", known["direction"].default))
    shared = {key: value for key, value in values.items() if key in known}
    return assemble(family, shared | given)


def assembled(model: str | ModelConfig, **overrides: object) -> ModelConfig:
    """Build a preset with overrides, or change a model's storage: see `preset`, `with_storage`.

    Raises:
        ArbError: there is no such preset, or a value is invalid.
    """
    if isinstance(model, str):
        return preset(model, **overrides)
    return with_storage(model, **overrides)


def with_storage(config: ModelConfig, **overrides: object) -> ModelConfig:
    """Return a model with other storage of its weights, or another context.

    Args:
        config: configuration of the model.
        overrides: `ctx`, fields of `STORAGE`, and `PART_RULES`; None keeps the current value.

    Raises:
        ArbError: a value is invalid, or only applies to presets.
    """
    given: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    rules = {name: given.pop(name) for name in PART_RULES if name in given}
    if others := [key for key in given if key not in ("ctx", *STORAGE)]:
        raise ArbError(
            f"{quoted(others)} only applies to a preset",
            hint="leave it out, or change the model itself",
            fields=tuple(others),
        )
    _set_direction(given, config.rule, config.direction)
    return with_part_rules(dataclasses.replace(config, **given), **rules)


def _set_direction(given: dict[str, Any], own_rule: str, own_direction: str | None) -> None:
    """Set rule and direction in `given` to their defaults if they are missing."""
    rule_name = given.setdefault("rule", own_rule)
    if rule_name not in RULES:
        return
    direction = DIRECTION[rule_name]
    if direction is None and "direction" in given:
        raise ArbError(
            f"the rule `{rule_name}` takes no direction",
            hint="leave `direction` out",
            fields=("direction",),
        )
    given.setdefault("direction", own_direction if rule_name == own_rule else direction)


def _with_attention(family: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Replace the name of a kind of attention by a family, or by an argument of the family.

    Raises:
        ArbError: the family does not have this kind.
    """
    chosen = given["attention"]
    others = {key: value for key, value in given.items() if key != "attention"}
    check_choice("attention", chosen, GRAPH_ATTENTIONS if family == "graph" else ATTENTIONS)
    if family == "graph":
        return family, others | {"attention": chosen == GRAPH_ATTENTIONS[0]}
    if family == "hnet":
        return family, given  # `preset` refuses `attention` for this family
    return chosen, others


def _with_iterated_top_k(given: dict[str, Any]) -> dict[str, Any]:
    """Rename the argument `top_k_experts` to `moe_top_k`, its name in the family `graph`.

    Raises:
        ArbError: both are given.
    """
    if "moe_top_k" in given:
        raise ArbError(
            "`top_k_experts` and `moe_top_k` both say how many experts a position uses",
            hint="give one of them",
            fields=("top_k_experts", "moe_top_k"),
        )
    others = {key: value for key, value in given.items() if key != "top_k_experts"}
    return others | {"moe_top_k": given["top_k_experts"]}


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """Build the configuration of a model from parsed JSON or TOML.

    Args:
        values: fields of `ModelConfig`; or, in files of earlier versions, the arguments of a short
            form and its family as `kind`. Without `kind`, the first family that has all arguments.

    Raises:
        TypeError: fields do not match this version.
        ArbError: values are invalid.
    """
    if not isinstance(values, dict):
        raise TypeError(f"a model is `{shown(values)}`, not an object")
    if "stages" in values:
        return from_fields(ModelConfig, values, "model")
    fields = {name: value for name, value in values.items() if name != "kind"}
    for name in FAMILIES:
        if values.get("kind", name) == name and fields.keys() <= arguments(name).keys():
            return assemble(name, fields)
    raise TypeError(f"no kind of model has the fields {', '.join(values)}")


UNIONS = {
    "mixer": MIXERS, "channel": CHANNELS, "beside": BESIDE, "codebook": BOOKS, "knowledge": BOOKS,
}  # fmt: skip
"""Classes of a field's value by its `kind`, for fields with several classes."""


NONE = "none"
"""None in files, as TOML has no null."""


def from_fields(kind: type, values: Any, where: str) -> Any:
    """Build a dataclass from a dictionary, recursively.

    Args:
        kind: the dataclass.
        values: values by field; instances of the field's class are used unchanged.
        where: path of the dictionary in its file, for errors.

    Raises:
        TypeError: a field is missing or unknown, or has a value in place of a dictionary.
        ArbError: a value is invalid; the message has its path.
    """
    if not isinstance(values, dict):
        raise TypeError(f"`{where}` is `{shown(values)}`, not an object")
    every = {field.name: field for field in dataclasses.fields(kind)}
    known = {name: field for name, field in every.items() if field.init}
    fields = dict(values)
    if "kind" in every and fields.pop("kind", every["kind"].default) != every["kind"].default:
        raise TypeError(f"`{where}` is not of the kind `{every['kind'].default}`")
    if unknown := [name for name in fields if name not in known]:
        raise TypeError(f"`{where}` has no field `{shown(unknown[0])}`")
    needed = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in fields]:
        raise TypeError(f"`{where}` has no `{missing[0]}`")
    built = {
        name: _value(plain_type(known[name].type), value, UNIONS.get(name), f"{where}.{name}")
        for name, value in fields.items()
    }
    try:
        return kind(**built)
    except ArbError as error:
        raise _at(error, known, where) from None


def _at(error: ArbError, known: Iterable[str], where: str) -> ArbError:
    """Replace the names of fields in an error by their paths in a file."""
    text = str(error)
    for name in error.fields:
        if name in known:
            text = re.sub(rf"`{name}(?=[`=])", f"`{where}.{name}", text, count=1)
    if text == str(error):
        text = f"`{where}`: {text}"
    return ArbError(text, hint=error.hint)


def _value(kind: Any, value: Any, union: dict[str, type[PartConfig]] | None, where: str) -> Any:
    """Convert a value of a file to the type of its field."""
    if value is None or (value == NONE and NoneType in get_args(kind)):
        return None
    if union is not None and not isinstance(value, list | tuple):
        usual = "codebook" if union is BOOKS else None  # files of earlier versions have no kind
        name = value.get("kind", usual) if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in union:
            raise TypeError(
                f"`{where}` is of the kind `{shown(name)}`, which is none of: {quoted(union)}"
            )
        return from_fields(union[name], value, where)
    kinds = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    for one in kinds:
        if get_origin(one) is tuple and isinstance(value, list | tuple):
            if len(value) > MOST_BLOCKS:
                raise TypeError(f"`{where}` has {len(value):,} entries, more than {MOST_BLOCKS:,}")
            element = get_args(one)[0]
            return tuple(
                _value(element, part, union, f"{where}[{index}]")
                for index, part in enumerate(value)
            )
        if isinstance(one, type) and is_dataclass(one) and not isinstance(value, one):
            return from_fields(one, value, where)
    return value

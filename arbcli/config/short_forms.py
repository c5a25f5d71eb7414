"""Short forms of models: functions from a few numbers, which are options, to a model.

The core has the form `dense`. A family may have a form, or a modifier that changes models of other
forms, in its `presets.py`; they are imported for arguments that no function of the core has. The
arguments are also the fields of configurations saved by earlier versions, which name the form in
`kind`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple

from arbcli.base.errors import ArbError, setting_error
from arbcli.base.lazy import ExtendedMapping, LazyMapping
from arbcli.config.model import LISTS, MAX_BLOCKS, BlockConfig, Context, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.settings import (
    MAX_SIZE,
    PRESETS_OWN,
    Declared,
    Setting,
    check_value,
    settings_of,
    split_type,
)
from arbcli.families import FAMILIES
from arbcli.model.rules import WITH_DIGITS

STORAGE = ("scale_type", "rule", "digits", "votes_fixes", "direction", "weights", "objective")
"""Arguments of every form that are fields of `ModelConfig`."""
PART_RULES = ("attention_rule", "mlp_rule")
"""Arguments of every form that are rules of parts."""

Dim = Annotated[int, Setting("Width of the residual stream.", minimum=1, default=PRESETS_OWN)]
Layers = Annotated[int, Setting("Number of blocks.", minimum=1, default=PRESETS_OWN)]
Heads = Annotated[int, Setting("Attention heads.", minimum=1, default=PRESETS_OWN)]
FFN = Annotated[int, Setting("Width of the MLPs.", minimum=1, default=PRESETS_OWN)]
SubNorms = Annotated[
    bool,
    Setting(
        "A norm before each output projection, with which a model can never be a GGUF file.",
        common=True,
    ),
]
Streams = Annotated[
    int,
    Setting(
        "Residual streams of the innermost stage, mixed by hyper-connections: 1, 2, 4 or 8."
        " Codebooks and the router need 1.",
        minimum=1,
    ),
]
Window = Annotated[
    int,
    Setting(
        "Bytes of the sliding window of compressed attention, or of the outer blocks of hnet"
        " presets.",
        minimum=1,
        default=PRESETS_OWN,
    ),
]
TopK = Annotated[
    int,
    Setting(
        "Entries that compressed attention selects, or rows that each head of a codebook reads.",
        minimum=1,
        default=PRESETS_OWN,
    ),
]


class Form(NamedTuple):
    """A short form of models."""

    build: Callable[..., ModelConfig]
    """Returns the model; its arguments are those of the form."""
    largest: Mapping[str, int] = {}
    """Upper bounds of sizes by argument; `MAX_SIZE` for all others."""
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Replaces options that presets of other forms have too by arguments of the form."""


def stack(
    mixers: Sequence[PartConfig],
    *,
    dim: int,
    layers: int,
    ffn: int,
    ctx: int,
    sub_norms: bool,
    streams: int,
    **storage: Any,
) -> ModelConfig:
    """Build a model of one stage whose blocks cycle through the mixers, each with an MLP."""
    channel = MLPConfig(width=ffn, sub_norm=sub_norms)
    blocks = tuple(
        BlockConfig(mixer=mixers[index % len(mixers)], channel=channel) for index in range(layers)
    )
    stage = StageConfig(dim=dim, streams=streams, blocks=blocks)
    return ModelConfig(ctx=ctx, stages=(stage,), **storage)


_KEY_HEADS = Setting(
    "Only with tiny, small, base and 1b: heads of keys and values, each shared by as many"
    " query heads (grouped-query attention).",
    minimum=1,
    default="as many as heads",
)


def dense(
    *,
    dim: Dim,
    layers: Layers,
    heads: Heads,
    ffn: FFN,
    ctx: Context,
    sub_norms: SubNorms = True,
    streams: Streams = 1,
    key_heads: Annotated[int | None, _KEY_HEADS] = None,
    **storage: Any,
) -> ModelConfig:
    """Build a model of `layers` blocks of attention and an MLP."""
    attention = AttentionConfig(heads=heads, kv_heads=key_heads, sub_norm=sub_norms)
    return stack(
        [attention], dim=dim, layers=layers, ffn=ffn, ctx=ctx, sub_norms=sub_norms,
        streams=streams, **storage,
    )  # fmt: skip


_ATTENTION_RULE = Setting(
    "Update rule of attention, or of Mamba, in blocks.",
    choices=WITH_DIGITS,
    default="that of `rule`",
)
_MLP_RULE = Setting(
    "Update rule of MLPs and experts in blocks. With nibble they take 1.26 bytes per"
    " weight, with moment 2.26.",
    choices=WITH_DIGITS,
    default="that of `rule`",
)


def set_part_rules(
    config: ModelConfig,
    *,
    attention_rule: Annotated[str | None, _ATTENTION_RULE] = None,
    mlp_rule: Annotated[str | None, _MLP_RULE] = None,
) -> ModelConfig:
    """Return a model whose mixers or channel mixers have other rules; None keeps theirs.

    Raises:
        ArbError: no block has a part that a rule is for.
    """
    if attention_rule is None and mlp_rule is None:
        return config
    if attention_rule and not any(block.mixer for _, block in config.blocks()):
        raise _missing_part("attention_rule", "attention or Mamba")
    if mlp_rule and not any(block.channel for _, block in config.blocks()):
        raise _missing_part("mlp_rule", "an MLP or experts")

    def set_rules(stage: StageConfig) -> StageConfig:
        lists: dict[str, Any] = {
            name: tuple(
                BlockConfig(
                    mixer=_set_rule(block.mixer, attention_rule),
                    channel=_set_rule(block.channel, mlp_rule),
                )
                for block in getattr(stage, name)
            )
            for name in LISTS
        }
        return replace(stage, **lists)

    return replace(config, stages=tuple(map(set_rules, config.stages)))


def _missing_part(name: str, part: str) -> ArbError:
    return setting_error(
        f"`{name}` is for blocks with {part}, and the model has none", f"leave `{name}` out"
    )


def _set_rule(part: PartConfig | None, rule: str | None) -> PartConfig | None:
    """Return a part with another rule, if there is a part and a rule."""
    return replace(part, rule=rule) if part and rule else part


def family_of(form: str) -> str:
    """Return the family that has a short form."""
    return next(name for name, family in FAMILIES.items() if family.form == form)


def _form(name: str) -> Form:
    """Import a short form."""
    if name == "dense":
        return Form(dense, {"layers": MAX_BLOCKS})
    return import_module(f"arbcli.families.{family_of(name)}.presets").FORM


FORMS = LazyMapping(("dense", *(family.form for family in FAMILIES.values() if family.form)), _form)
"""Short forms by name."""


def _arguments_of(function: Callable) -> dict[str, inspect.Parameter]:
    """Return the named arguments of a form or a modifier."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


@cache
def _modifiers_of(form: str) -> tuple[Callable[..., ModelConfig], ...]:
    """Import the modifiers for models of a form: those that share none of its arguments."""
    form_arguments = _arguments_of(FORMS[form].build)
    modifiers = (
        import_module(f"arbcli.families.{name}.presets").MODIFIER
        for name, family in FAMILIES.items()
        if family.modifies
    )
    return tuple(m for m in modifiers if form_arguments.keys().isdisjoint(_arguments_of(m)))


@cache
def arguments(form: str) -> ExtendedMapping[inspect.Parameter]:
    """Return the arguments of a short form by name, including those of storage and of modifiers.

    Modifiers are imported for names that the form itself does not have.
    """
    form_arguments = _arguments_of(FORMS[form].build)
    storage = {name: inspect.signature(ModelConfig).parameters[name] for name in STORAGE}
    rules = _arguments_of(set_part_rules)

    def modifier_arguments() -> dict[str, inspect.Parameter]:
        return {
            n: parameter
            for function in _modifiers_of(form)
            for n, parameter in _arguments_of(function).items()
        }

    return ExtendedMapping(form_arguments | storage | rules, modifier_arguments)


def _functions_of_families() -> Iterator[Callable[..., ModelConfig]]:
    """Import the forms and modifiers of all families, in the order of `FAMILIES`."""
    for name, family in FAMILIES.items():
        if family.form or family.modifies:
            module = import_module(f"arbcli.families.{name}.presets")
            yield module.FORM.build if family.form else module.MODIFIER


def _merge_families(read: Callable[[Callable], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return a function that merges the results of `read` for each function of the families."""
    return lambda: {
        name: value
        for function in _functions_of_families()
        for name, value in read(function).items()
    }


ARGUMENTS: ExtendedMapping[inspect.Parameter] = ExtendedMapping(
    arguments("dense").first, _merge_families(_arguments_of)
)
"""Arguments of all forms and modifiers by name."""
MODEL_SETTINGS: ExtendedMapping[Declared] = ExtendedMapping(
    settings_of(ModelConfig) | settings_of(set_part_rules) | settings_of(dense),
    _merge_families(settings_of),
)
"""Settings of models, by name of the argument."""


def assemble(form: str, values: dict[str, Any]) -> ModelConfig:
    """Build a model from the arguments of a short form, from Python or JSON.

    Raises:
        ArbError: a value has the wrong type, is out of bounds, or contradicts another.
        TypeError: an argument is missing or unknown.
    """
    build, largest, _ = FORMS[form]
    form_arguments, known = _arguments_of(build), arguments(form)
    required = [name for name, p in form_arguments.items() if p.default is p.empty]
    if missing := [name for name in required if name not in values]:
        raise TypeError(f"a model of the family `{form}` has no {', '.join(missing)}")
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise TypeError(f"a model of the family `{form}` has no `{name}`")
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        kind, setting = split_type(known[name].annotation)
        check_value(name, value, kind, setting, largest.get(name, MAX_SIZE))
        checked[name] = value
    built = {name: value for name, value in checked.items() if name in (*form_arguments, *STORAGE)}
    config = build(**built)
    if checked.keys() - built.keys() - {*PART_RULES}:
        for modify in _modifiers_of(form):
            names = checked.keys() & _arguments_of(modify).keys()
            config = modify(config, **{name: checked[name] for name in names})
    rules: dict[str, Any] = {name: checked[name] for name in PART_RULES if name in checked}
    return set_part_rules(config, **rules)

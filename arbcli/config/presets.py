"""Models that have a name, and configurations from what a file holds."""

import dataclasses
from typing import Any

from arbcli.config.checks import check_choice
from arbcli.config.compressed import ATTENTIONS, CompressedConfig
from arbcli.config.dense import ModelConfig
from arbcli.config.graph import GRAPH_ATTENTIONS, GraphConfig
from arbcli.config.hnet import HNetConfig
from arbcli.errors import ArbError
from arbcli.rules import RULES, find_rule

KINDS = {kind.kind: kind for kind in (ModelConfig, GraphConfig, HNetConfig, CompressedConfig)}
"""Classes of configurations, by the kind of model that they describe."""
PRESETS = {
    "tiny": ModelConfig(dim=256, layers=4, heads=4, ffn=704, ctx=64),
    "small": ModelConfig(dim=384, layers=6, heads=6, ffn=1024, ctx=256),
    "base": ModelConfig(dim=768, layers=12, heads=12, ffn=2048, ctx=1024),
    "1b": ModelConfig(dim=2048, layers=24, heads=16, ffn=5632, ctx=2048),
    "arb-long": CompressedConfig(
        dim=768, layers=12, heads=12, ffn=1920, ctx=16384, head_width=128, rotary=64,
    ),
    "arb-tiny": GraphConfig(
        dim=256, layers=4, heads=4, ffn=832, ctx=256, rule="moment",
        latent=128, rotary=32, ngram_rows=16384, ngram_dim=64, key_dim=32,
        codes=(64, 64), code_dim=64, code_heads=2, knowledge=(128, 128), knowledge_dim=32,
        knowledge_heads=4, top_k=4, experts=8, expert_dim=160, expert_ffn=160, gate_dim=32,
        adapter_rank=16, edges=(4096, 4), head_ffn=416, moe=False, graph=False,
    ),
    "arb-3b": GraphConfig(
        dim=2560, layers=20, heads=20, ffn=10240, ctx=64, rule="nibble", direction="factored",
        latent=512, rotary=32, ngram_rows=65987, ngram_dim=512, key_dim=128,
        codes=(512, 256), code_dim=1024, code_heads=4, knowledge=(2500, 2000), knowledge_dim=64,
        knowledge_heads=16, top_k=8, experts=56, expert_dim=1280, expert_ffn=2560, gate_dim=224,
        adapter_rank=64, edges=(32768, 4), head_ffn=17600,
    ),
    "hnet-tiny": HNetConfig(
        dim=256, layers=3, heads=4, ffn=704, ctx=256, outer_dim=(128,), outer_layers=(1,),
        outer_heads=(4,), outer_ffn=(352,), chunk_length=(4,), window=32,
    ),
    "hnet-small": HNetConfig(
        dim=384, layers=5, heads=6, ffn=1024, ctx=1024, outer_dim=(256,), outer_layers=(1,),
        outer_heads=(4,), outer_ffn=(704,), chunk_length=(4,), window=128,
    ),
    "hnet-base": HNetConfig(
        dim=768, layers=10, heads=12, ffn=2048, ctx=4096, outer_dim=(512,), outer_layers=(2,),
        outer_heads=(8,), outer_ffn=(1408,), chunk_length=(4,), window=128,
    ),
    "hnet-two-stage": HNetConfig(
        dim=768, layers=10, heads=12, ffn=2048, ctx=4096, outer_dim=(384, 512),
        outer_layers=(2, 2), outer_heads=(6, 8), outer_ffn=(1024, 1408), chunk_length=(3, 3),
        window=128,
    ),
}  # fmt: skip


def check_preset(name: str) -> None:
    """Refuse a name that is no preset's.

    Raises:
        ArbError: it is none.
    """
    if name not in PRESETS:
        names = ", ".join(f"`{known}`" for known in PRESETS)
        raise ArbError(f"no preset is named `{name}`", hint=f"choose one of: {names}")


def preset(name: str, **overrides: object) -> ModelConfig:
    """Build the configuration called `name`, with the overrides that are not None.

    Another rule than the preset's brings its own direction, unless one is given.

    Raises:
        ArbError: no preset has that name, or a value does not fit.
    """
    check_preset(name)
    given = {key: value for key, value in overrides.items() if value is not None}
    base = PRESETS[name]
    if isinstance(given.get("attention"), str):
        base, given = _with_attention(base, given)
    fields = {field.name for field in dataclasses.fields(base)}
    if others := [key for key in given if key not in fields]:
        parts = ", ".join(f"`{key}`" for key in others)
        having = " or ".join(f"`{k}`" for k, v in PRESETS.items() if hasattr(v, others[0]))
        raise ArbError(
            f"the preset `{name}` has no such part: {parts}",
            hint=f"use it with {having}" if having else None,
            fields=tuple(others),
        )
    given.setdefault("rule", base.rule)
    if given["rule"] in RULES:
        rule = find_rule(given["rule"])
        if rule.direction is None and "direction" in given:
            raise ArbError(
                f"the rule `{given['rule']}` takes no direction",
                hint="leave `direction` out",
                fields=("direction",),
            )
        own = given["rule"] == base.rule
        given.setdefault("direction", base.direction if own else rule.direction)
    return dataclasses.replace(base, **given)


def _with_attention(base: ModelConfig, given: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """Change a preset to a kind of attention by its name, and strike that off what was given.

    Raises:
        ArbError: there is no such kind, or not of this preset.
    """
    chosen = given["attention"]
    others = {key: value for key, value in given.items() if key != "attention"}
    known = GRAPH_ATTENTIONS if isinstance(base, GraphConfig) else ATTENTIONS
    check_choice("attention", chosen, known)
    if isinstance(base, GraphConfig):
        return base, others | {"attention": chosen == GRAPH_ATTENTIONS[0]}
    if isinstance(base, HNetConfig):
        return base, given  # it has no such part
    kind = CompressedConfig if chosen == "compressed" else ModelConfig
    if type(base) is not kind:
        shared = [field.name for field in dataclasses.fields(ModelConfig)]
        base = kind(**{field: getattr(base, field) for field in shared})
    return base, others


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """Rebuild the configuration of a model from its fields, as JSON holds them.

    Args:
        values: fields, with the `kind`, or without: a checkpoint has the fields alone, and they
            are of the first kind that knows all of them.

    Raises:
        TypeError: they are of another version.
        ArbError: no model can have them.
    """
    fields = {name: value for name, value in values.items() if name != "kind"}
    for name, kind in KINDS.items():
        known = {field.name for field in dataclasses.fields(kind)}
        if values.get("kind", name) == name and fields.keys() <= known:
            return kind(**fields)
    raise TypeError(f"no kind of model has the fields {', '.join(values)}")

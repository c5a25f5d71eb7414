"""Update rules of parts: what is stored by them, at which rate it steps, and what cannot be."""

import tomllib
from dataclasses import asdict, replace
from operator import attrgetter

import pytest
from graph_parts import graph_config

from arbcli.base.errors import ArbError
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.model_file import model_from_toml, model_lines
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.base import every_part, remove_rules
from arbcli.config.presets import assembled, config_from_dict, preset
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.media.config import CompositeConfig
from arbcli.inspect.memory import predict
from arbcli.model.build import build_model
from arbcli.model.rules import (
    DIGITS,
    FADING,
    LR,
    LR_OF_DIGITS,
    LR_OF_FADING,
    WITH_DIGITS,
    find_rule,
    relative_lr,
)

TINY = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 16}
CHUNKED = preset(
    "hnet-tiny", dim=24, layers=1, heads=2, ffn=32, ctx=16, outer_dim=16, outer_heads=2,
    outer_ffn=20, window=4,
)  # fmt: skip
AHEAD = replace(preset("tiny", **TINY), ahead=AheadConfig(positions=3, width=20))
COMPOSITE = replace(preset("tiny", **TINY), composite=CompositeConfig())
BETWEEN = ("codebook.", "knowledge.", "moe_graph.")
PLACES = {
    "beside.0": (graph_config(), ("sequencer.",)),
    "beside.1": (graph_config(), ("memgram.",)),
    "stages.0.blocks.1.mixer": (graph_config(), ("blocks.1.attention.",)),
    "stages.0.blocks.0.channel": (graph_config(), ("blocks.0.mlp.",)),
    "stages.0.memories": (graph_config(), BETWEEN),
    "stages.0.memories.codebook": (graph_config(), BETWEEN[:1]),
    "stages.0.memories.knowledge": (graph_config(code_search="nearest"), BETWEEN[1:2]),
    "stages.0.memories.iterated": (graph_config(), BETWEEN[2:]),
    "stages.0.memories.iterated.experts": (graph_config(), ("moe_graph.experts.",)),
    "head": (graph_config(), ("byte_mlp.",)),
    "stages.0.before.0.channel": (CHUNKED, ("stages.0.encoder.0.mlp.",)),
    "stages.0.after.0.mixer": (CHUNKED, ("stages.0.decoder.0.attention.",)),
    "stages.0.chunking": (
        CHUNKED, tuple(f"stages.0.{name}." for name in ("router", "inward", "outward", "residual")),
    ),
    "stages.1.blocks.0.channel": (CHUNKED, ("blocks.0.mlp.",)),
    "ahead": (AHEAD, ("ahead.",)),
    "composite": (COMPOSITE, ("head.",)),
}  # fmt: skip
"""A model, and the first letters of the names of a part's tensors, by the place of the part."""


def set_rule(config, place: list[str], rule: str):
    """Return a configuration in which the part at a place has a rule."""
    if not place:
        return replace(config, rule=rule)
    at, *rest = place
    if at.isdigit():
        inner = set_rule(config[int(at)], rest, rule)
        return (*config[: int(at)], inner, *config[int(at) + 1 :])
    return replace(config, **{at: set_rule(getattr(config, at), rest, rule)})


def trained(config: ModelConfig) -> dict:
    tensors = build_model(config).packed_tensors().items()
    return {name: tensor for name, tensor in tensors if not tensor.frozen}


@pytest.mark.parametrize(
    ("place", "digits"), [(place, ("trit", "all")[n % 2]) for n, place in enumerate(PLACES)]
)
def test_all_weights_of_a_part_are_stored_and_stepped_by_its_rule_and_no_others(place, digits):
    plain, names = PLACES[place]
    plain = replace(plain, digits=digits)
    config = set_rule(plain, place.split("."), "nibble")
    before, after = trained(plain), trained(config)
    of_part = {name for name in before if name.startswith(names)}
    assert 0 < len(of_part) < len(before)
    assert {name for name, tensor in after.items() if tensor.rule.name == "nibble"} == of_part
    for name, tensor in after.items():
        assert {*tensor.state} == {*before[name].state} - ({"moment"} if name in of_part else set())
        assert tensor.rule.reads_all == before[name].rule.reads_all
        share = {"trit": 0.4 / 0.7, "all": 0.4 / 0.5}[digits] if name in of_part else 1
        assert tensor.lr_factor == pytest.approx(share * before[name].lr_factor)
        assert tensor.direction is before[name].direction
    weights = sum(after[name].num_weights for name in of_part)
    assert predict(config).total.state_bytes == predict(plain).total.state_bytes - weights
    assert remove_rules(config) == plain
    text = "\n".join(model_lines(config))
    assert model_from_toml(tomllib.loads(text)["model"], "it") == config
    assert config_from_dict(asdict(config)) == config != plain


def test_part_within_a_part_may_go_back_to_the_rule_of_the_model():
    config = set_rule(graph_config(), ["stages", "0", "memories"], "nibble")
    config = set_rule(config, ["stages", "0", "memories", "iterated"], "moment")
    before, after = trained(graph_config()), trained(config)
    for name, tensor in after.items():
        in_memories = name.startswith(("codebook.", "knowledge."))
        assert tensor.rule.name == ("nibble" if in_memories else "moment")
        assert (tensor.lr_factor == before[name].lr_factor) == (not in_memories)


def test_configuration_of_before_has_parts_of_the_models_rule():
    values = asdict(preset("tiny", **TINY))
    block = values["stages"][0]["blocks"][0]
    assert block["mixer"].pop("rule", ...) is block["channel"].pop("rule", ...) is None
    assert config_from_dict(values) == preset("tiny", **TINY)
    assert preset("tiny", **TINY).rules == ("moment",)


@pytest.mark.parametrize("digits", DIGITS)
def test_relative_rates_of_rules_equal_those_of_models_with_one_rule(digits):
    """Of weights that fade, as at the end of the fade, when the rate of `moment` has doubled."""
    rates = {"trit": LR, "all": LR_OF_DIGITS}.get(digits)
    if rates is None:
        rates = {name: LR_OF_FADING[name] * find_rule(name, "fade").fade_growth for name in FADING}
    rates.pop("votes", None) if digits != "trit" else None
    names = [name for name in WITH_DIGITS if name in rates]
    for name in names:
        for other in names:
            wanted = rates[name] / rates[other]
            assert relative_lr(name, other, digits) == pytest.approx(wanted)


def test_options_give_parts_of_blocks_a_rule():
    config = preset("tiny", **TINY, attention_rule="carry", mlp_rule="nibble")
    assert config.rules == ("moment", "carry", "nibble")
    assert config.rule_text == "moment+carry+nibble"
    assert assembled(preset("tiny", **TINY), attention_rule="carry", mlp_rule="nibble") == config
    assert assembled(config, mlp_rule="moment").rules == ("moment", "carry")
    read = attrgetter("kind", "rule")
    rules = {read(part) for part in every_part(CHUNKED.stages) if part.kind != "chunking"}
    assert rules == {("attention", None), ("mlp", None)}
    chunked = assembled(CHUNKED, mlp_rule="nibble")
    rules = {read(part) for part in every_part(chunked.stages) if part.kind != "chunking"}
    assert rules == {("attention", None), ("mlp", "nibble")}
    without_mlps = preset("hnet-tiny", outer_blocks="mamba", mlp_rule="nibble")
    assert {block.channel for block in without_mlps.stages[0].before} == {None}
    bare = StageConfig(dim=32, blocks=(BlockConfig(mixer=AttentionConfig(heads=2)),))
    with pytest.raises(ArbError, match="`mlp_rule` is for blocks with an MLP or experts"):
        assembled(ModelConfig(ctx=16, stages=(bare,)), mlp_rule="nibble")

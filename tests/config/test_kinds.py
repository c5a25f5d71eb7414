"""A configuration is rebuilt from what a file holds, with or without the kind of its model."""

import dataclasses
import json

import pytest

from arbcli.config.parts import CompressedAttentionConfig
from arbcli.config.presets import PRESETS, config_from_dict, preset
from arbcli.config.site import Site
from arbcli.config.training import (
    COMPUTES,
    TrainConfig,
    train_config,
    train_config_dict,
    train_config_from,
)
from arbcli.device import COMPUTE
from arbcli.errors import ArbError


@pytest.mark.parametrize("name", PRESETS)
def test_fields_of_a_checkpoint_are_enough(name):
    config = preset(name)
    assert config_from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("name", "given", "direction"),
    [
        ("tiny", {}, "orthogonal"),
        ("tiny", {"rule": "carry"}, "factored"),
        ("tiny", {"rule": "carry", "direction": "sign"}, "sign"),
        ("tiny", {"rule": "votes"}, None),
        ("arb-3b", {}, "factored"),  # and not that of its rule
        ("arb-3b", {"rule": "nibble"}, "factored"),
        ("arb-3b", {"rule": "moment"}, "orthogonal"),
        ("hnet-base", {}, "orthogonal"),
    ],
)
def test_direction_is_of_the_preset_and_else_of_another_rule(name, given, direction):
    assert preset(name, **given).direction == direction


@pytest.mark.parametrize("name", PRESETS)
def test_configuration_of_a_run_is_rebuilt(name):
    config = train_config(name, device="cpu", backend="torch", compute="fp32", data=["a.txt"])
    values = json.loads(json.dumps({"config": train_config_dict(config)}))
    assert train_config_from(values) == config


def test_fields_of_another_version_are_refused():
    values = dataclasses.asdict(preset("tiny"))
    short = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16}
    assert config_from_dict(short) == preset("tiny", **short)
    for wrong in (
        values | {"wings": 2}, short | {"kind": "bird"}, short | {"wings": 2}, {"dim": 32},
        values | {"stages": [{"dim": 32, "wings": 2}]},
        values | {"beside": [{"kind": "mlp", "width": 3}]},
    ):  # fmt: skip
        with pytest.raises(TypeError):
            config_from_dict(wrong)


@pytest.mark.parametrize(
    "config",
    [None, {}, [], {"model": "tiny", "data": (), "val": ()}, {"model": [], "data": (), "val": ()},
     {"model": {"dim": 32}, "data": 3, "val": ()}],
)  # fmt: skip
def test_settings_of_a_run_that_are_none_are_refused(config):
    model = dataclasses.asdict(preset("tiny"))
    facts = {"config": {"model": model, "data": [], "val": []}}
    assert train_config_from(facts).model == preset("tiny")
    with pytest.raises(ArbError, match="does not fit this version of arb") as caught:
        train_config_from({"config": config})
    assert "`config.json`" in caught.value.hint


def test_entries_that_a_byte_sees_are_those_of_a_whole_context_and_one_at_least():
    parts = [CompressedAttentionConfig(heads=2, ratio=ratio) for ratio in (4, 128, 130, 131)]
    site = Site(dim=64, depth=1, ctx=130)
    assert [part.entries(site) for part in parts] == [32, 1, 1, 1]


def test_every_compute_has_a_dtype():
    assert COMPUTE.keys() == set(COMPUTES)
    assert TrainConfig.__dataclass_fields__["compute"].default in COMPUTES


@pytest.mark.parametrize(("width", "rotated"), [(64, 32), (10, 4), (6, 2)])
def test_half_of_a_compressed_head_is_turned_and_an_even_part_of_it(width, rotated):
    config = CompressedAttentionConfig(heads=2, head_width=width)
    site = Site(dim=64, depth=1, ctx=130)
    assert (config.rotated(site), config.width(site)) == (rotated, width)

"""A configuration is rebuilt from what a file holds, with or without the kind of its model."""

import dataclasses
import json

import pytest

from arbcli.config.presets import KINDS, PRESETS, config_from_dict, preset
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
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert "kind" not in values
    rebuilt = config_from_dict(values)
    assert rebuilt == config
    assert type(rebuilt) is type(config) is KINDS[config.kind]


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("hnet")])
def test_blocks_of_an_hnet_are_stored_as_it_says(name):
    given = {"scale_type": "T64", "rule": "nibble", "direction": "sign", "digits": "all"}
    config = preset(name, **given, sub_norms=False)
    main = config.main()
    assert {field: getattr(main, field) for field in given} == given
    assert (main.weights, main.sub_norms) == (config.weights, False)


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
def test_configuration_of_a_run_says_its_kind(name):
    config = train_config(name, device="cpu", backend="torch", compute="fp32", data=["a.txt"])
    values = json.loads(json.dumps({"config": train_config_dict(config)}))
    assert values["config"]["model"]["kind"] == config.model.kind
    assert train_config_from(values) == config
    del values["config"]["model"]["kind"]  # as runs of before have it
    assert train_config_from(values) == config


def test_fields_of_another_version_are_refused():
    values = dataclasses.asdict(preset("tiny"))
    for wrong in (values | {"wings": 2}, values | {"kind": "bird"}, {"dim": 32}):
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
    config = preset("arb-long", ctx=130)
    assert [config.entries(ratio) for ratio in (4, 128, 130, 131)] == [32, 1, 1, 1]


def test_every_compute_has_a_dtype():
    assert COMPUTE.keys() == set(COMPUTES)
    assert TrainConfig.__dataclass_fields__["compute"].default in COMPUTES


@pytest.mark.parametrize(("width", "turned"), [(64, 32), (10, 4), (6, 2)])
def test_half_of_a_compressed_head_is_turned_and_an_even_part_of_it(width, turned):
    config = dataclasses.replace(PRESETS["arb-long"], head_width=width, rotary=None)
    assert (config.turned, config.head_dim) == (turned, width)

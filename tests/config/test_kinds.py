"""Settings of models by presets, short forms, files and saved models: what is kept, and refused."""

import dataclasses
import tomllib
from contextlib import nullcontext

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.config.initial import FREE, check_initial, digits_after, is_kept
from arbcli.config.model_file import model_from_toml, model_lines
from arbcli.config.presets import PRESETS, SHORT_FORMS, config_from_dict, preset
from arbcli.config.short_forms import ARGUMENTS
from arbcli.config.training import train_config, train_config_from
from arbcli.model.language_model import LanguageModel
from arbcli.model.rules import STAGES


def test_embedding_and_head_have_their_directions_and_blocks_the_model_s():
    config = dataclasses.replace(
        preset("tiny"), embedding_direction="sign", head_direction="factored"
    )
    with torch.device("meta"):
        tensors = LanguageModel(config).packed_tensors()
    names = {name: type(tensor.direction).__module__ for name, tensor in tensors.items()}
    assert names.pop("embedding.weight").endswith(".sign")
    assert names.pop("head.weight").endswith(".factored")
    matrices = {name for name, kind in names.items() if kind.endswith(".orthogonal")}
    assert any("attention.qkv" in name for name in matrices)
    assert model_from_toml(tomllib.loads("\n".join(model_lines(config)))["model"], "it") == config


def test_direction_is_of_the_preset_and_else_of_another_rule():
    for name, given, direction in (
        ("tiny", {}, "orthogonal"), ("tiny", {"rule": "carry"}, "factored"),
        ("tiny", {"rule": "carry", "direction": "sign"}, "sign"), ("tiny", {"rule": "votes"}, None),
        ("arb-3b", {}, "factored"),  # and not that of its rule
        ("arb-3b", {"rule": "nibble"}, "factored"), ("arb-3b", {"rule": "moment"}, "orthogonal"),
        ("hnet-base", {}, "orthogonal"),
    ):  # fmt: skip
        assert preset(name, **given).direction == direction


@pytest.mark.parametrize(
    ("direction", "fields", "symbols"),
    [("orthogonal", {}, "factored"), ("factored", {}, None), ("sign", {}, None),
     ("sign", {"head_direction": "factored", "embedding_direction": "factored"}, "factored")],
)  # fmt: skip
def test_directions_of_many_symbols_follow_that_of_a_saved_model(direction, fields, symbols):
    machine = {"device": "cpu", "backend": "torch", "compute": "fp32"}
    model = dataclasses.replace(PRESETS["tiny"], vocabulary=5000, direction="factored")
    for name in ("orthogonal", direction):
        model = train_config(model, **machine, direction=name, fields=fields).model
    assert (model.embedding_direction, model.head_direction) == (symbols, symbols)


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


@pytest.mark.parametrize("name", SHORT_FORMS)
def test_fields_that_were_saved_before_are_read_with_the_same_meaning(name):
    form, values = SHORT_FORMS[name]
    for saved in (dict(values), values | {"kind": form}):
        assert config_from_dict(saved) == preset(name)


CHANGED = {
    "rule": ("tiny", {"rule": "carry", "direction": "orthogonal"}, "carry"),
    "scale_type": ("tiny", {"scale_type": "T64"}, "T64"),
    "weights": ("tiny", {"weights": "float"}, "float"),
    "dim": ("tiny", {"dim": 64}, 64),
    "heads": ("tiny", {"heads": 2}, 2),
    "width": ("tiny", {"ffn": 64}, 64),
    "number of blocks": ("tiny", {"layers": 3}, 3),
    "sub_norm": ("tiny", {"sub_norms": False}, False),
    "streams": ("tiny", {"streams": 2}, 2),
    "top_k": ("arb-long", {"top_k": 3}, 3),
    "experts": ("arb-3b", {"experts": 7}, 7),
    "boundaries": ("hnet-tiny", {"boundaries": "every"}, "every"),
    "window": ("hnet-tiny", {"window": 5}, 5),
}
"""Options of a run, and the message of their refusal, by the field that it names."""


@pytest.mark.parametrize("field", CHANGED)
def test_every_setting_that_differs_is_refused_by_its_name(field):
    name, options, value = CHANGED[field]
    with pytest.raises(ArbError, match=f"(?m)^`{field}` is {value}, and .* in the saved model$"):
        check_initial(preset(name, **options), PRESETS[name])


def test_options_that_are_kept_are_those_of_the_saved_model():
    assert {name for name in ARGUMENTS if not is_kept(name)} == set(FREE)
    with pytest.raises(ArbError, match=r"(?m)^the run has 512 symbols, and the saved model 256$"):
        check_initial(dataclasses.replace(PRESETS["tiny"], vocabulary=512), PRESETS["tiny"])
    able = {"trit": {"trit"}, "all": {"all", "fade"}}
    for before in STAGES:
        saved = dataclasses.replace(PRESETS["tiny"], digits=before)
        assert set(digits_after(before)) == able.get(before, {"trit", "all", "fade"})
        for digits in ("trit", "all", "fade"):
            model, said = dataclasses.replace(saved, digits=digits), nullcontext()
            if digits not in digits_after(before):
                message = f"`digits={digits}` does not match the saved weights"
                said = pytest.raises(ArbError, match=message)
            with said:
                check_initial(model, saved)

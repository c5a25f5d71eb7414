"""Settings of a saved model that a run keeps, and those that it may choose."""

import dataclasses
import json

import pytest

from arbcli.config.initial import FREE, KEPT, check_initial, digits_after
from arbcli.config.presets import PRESETS, config_from_dict, preset
from arbcli.config.short_forms import ARGUMENTS
from arbcli.errors import ArbError
from arbcli.rules import STAGES

CHANGED = {
    "rule": ("tiny", {"rule": "carry", "direction": "orthogonal"}, "carry"),
    "direction": ("tiny", {"direction": "sign"}, "sign"),
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
"""By the field that is named: the options of a run, and what is said of them."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_model_begins_with_its_own_weights(name):
    values = json.loads(json.dumps(dataclasses.asdict(PRESETS[name])))
    check_initial(dataclasses.replace(PRESETS[name], ctx=24), config_from_dict(values))


@pytest.mark.parametrize("field", CHANGED)
def test_every_setting_that_differs_is_refused_by_its_name(field):
    name, options, value = CHANGED[field]
    with pytest.raises(ArbError, match=f"^`{field}` is {value}, and in the saved model "):
        check_initial(preset(name, **options), PRESETS[name])


def test_every_option_of_a_model_is_kept_or_free():
    assert set(ARGUMENTS) - KEPT == set(FREE)


def test_model_of_other_stages_is_refused():
    with pytest.raises(ArbError, match="`number of stages` is 2, and in the saved model 1"):
        check_initial(PRESETS["hnet-tiny"], dataclasses.replace(PRESETS["tiny"], ctx=256))


@pytest.mark.parametrize(
    ("before", "able"),
    [
        ("trit", {"trit"}),
        ("all", {"all", "fade"}),
        *((stage, {"trit", "all", "fade"}) for stage in STAGES[1:-1]),
    ],
)
def test_digits_follow_those_that_weights_were_read_as(before, able):
    saved = dataclasses.replace(PRESETS["tiny"], digits=before)
    assert set(digits_after(before)) == able
    for digits in ("trit", "all", "fade"):
        model = dataclasses.replace(saved, digits=digits)
        if digits in able:
            check_initial(model, saved)
        else:
            with pytest.raises(ArbError, match=f"`digits={digits}` reads other weights"):
                check_initial(model, saved)

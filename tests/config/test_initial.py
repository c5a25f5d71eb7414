"""What of a saved model a run keeps that begins with its weights, and what it may choose."""

import copy
import dataclasses
import json

import pytest

from arbcli.config.initial import FREE, KEPT, check_initial, digits_after
from arbcli.config.presets import PRESETS, config_from_dict
from arbcli.errors import ArbError
from arbcli.rules import STAGES

SAVED = {preset.kind: preset for preset in PRESETS.values()}


@pytest.mark.parametrize("kind", SAVED)
def test_model_of_every_kind_begins_with_its_own_weights(kind):
    values = json.loads(json.dumps(dataclasses.asdict(SAVED[kind])))
    check_initial(dataclasses.replace(SAVED[kind], ctx=24), config_from_dict(values))


@pytest.mark.parametrize("kind", SAVED)
def test_every_setting_that_differs_is_refused_by_its_name(kind):
    fields = {field.name for field in dataclasses.fields(SAVED[kind])}
    assert fields - KEPT == set(FREE)
    for name in fields & KEPT:
        other = copy.copy(SAVED[kind])
        object.__setattr__(other, name, "something else")
        with pytest.raises(ArbError, match=f"^`{name}` is something else, and in the saved model "):
            check_initial(other, SAVED[kind])


def test_model_of_another_kind_is_refused():
    with pytest.raises(ArbError, match="of the kind hnet, and the saved one of dense"):
        check_initial(SAVED["hnet"], SAVED["dense"])


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

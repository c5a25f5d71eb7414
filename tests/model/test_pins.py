"""A configuration that a checkpoint holds makes the model that it made when it was written."""

import json

import pytest
from pins import PATH, SEEDS, first_weights, layout

from arbcli.config.presets import PRESETS, config_from_dict, preset

PINS = json.loads(PATH.read_text())
SMALL = [name for name, pin in PINS.items() if "first" in pin]
"""Pins of models whose weights take no time to draw."""
OF_PRESETS = [name for name, pin in PINS.items() if "preset" in pin]
"""Pins of presets with options; other models can only be written as a whole."""
LAYOUTS = ["tiny", "arb-tiny", *(name for name in SMALL if "preset" not in PINS[name])]
"""Models of every kind; large ones have the parts of these."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_configuration_of_a_checkpoint_makes_the_same_tensors(name):
    pin = PINS[name]
    assert layout(config_from_dict(pin["config"])) == pin["layout"]


@pytest.mark.parametrize("name", OF_PRESETS)
def test_options_make_the_model_that_they_made(name):
    """The same as the fields of a checkpoint, and those of a run, which name their kind."""
    pin = PINS[name]
    config = preset(pin["preset"], **pin["options"])
    assert config == config_from_dict(pin["config"])
    if "kind" in pin:
        assert config == config_from_dict({"kind": pin["kind"]} | pin["config"])


@pytest.mark.parametrize("name", SMALL[::2])
def test_first_weights_are_the_same(name):
    pin, seed = PINS[name], SEEDS[-1]
    assert first_weights(config_from_dict(pin["config"]), seed) == pin["first"][str(seed)]


def test_every_preset_is_pinned():
    plain = {PINS[name]["preset"] for name in OF_PRESETS if not PINS[name]["options"]}
    assert plain == set(PRESETS)

"""A configuration that a checkpoint holds makes the model that it made when it was written."""

import json

import pytest
from marks import mostly_slow
from pins import PATH, SEEDS, first_weights, layout

from arbcli.config.presets import PRESETS, config_from_dict, preset

PINS = json.loads(PATH.read_text())
SMALL = [name for name, pin in PINS.items() if "first" in pin]
"""Pins of models whose weights take no time to draw."""
LARGE = {"arb-3b", "arb-deep"}
OF_PRESETS = [name for name, pin in PINS.items() if "preset" in pin]
"""Pins of presets with options; other models can only be written as a whole."""
QUICK = {name for name in OF_PRESETS if not PINS[name]["options"]} - LARGE | set(SMALL)
"""Presets as they are, but for those of most layers, and small sizes of every kind."""


@pytest.mark.parametrize("name", mostly_slow(PINS, lambda name: name in QUICK))
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


@pytest.mark.parametrize("seed", mostly_slow(SEEDS, lambda seed: seed == SEEDS[-1]))
@pytest.mark.parametrize("name", SMALL)
def test_first_weights_are_the_same(name, seed):
    pin = PINS[name]
    assert first_weights(config_from_dict(pin["config"]), seed) == pin["first"][str(seed)]


def test_every_preset_is_pinned():
    plain = {PINS[name]["preset"] for name in OF_PRESETS if not PINS[name]["options"]}
    assert plain == set(PRESETS)

"""Memory predicted from a configuration equals that of the model's tensors, to the byte."""

import dataclasses
import itertools
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from marks import mostly_slow

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.config.presets import PRESETS, preset, set_symbol_directions
from arbcli.inspect.memory import KINDS, measure, predict, what_if
from arbcli.model.build import build_model
from arbcli.model.optimizers import DIRECTIONS
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules import DIRECTION, RULES

TINY = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16}
RAGGED = {"dim": 44, "layers": 2, "heads": 2, "ffn": 167, "ctx": 16}
"""Inputs of 44 and 167 weights: no multiple of 5, and of 4 at most, one longer than a block."""
KINDS_OF_UPDATE = [
    (rule, direction)
    for rule in RULES
    for direction in (DIRECTIONS if DIRECTION[rule] else (None,))
]


def model_of(config, device="meta"):
    with torch.device(device):
        return build_model(config)


def predicted_bytes(config):
    areas = predict(config).areas.items()
    return {
        area: {kind: size for kind, size in part.bytes_by_kind.items() if size}
        for area, part in areas
    }


@pytest.mark.parametrize(
    ("name", "rule", "direction"),
    mostly_slow(
        [(name, *kind) for name in PRESETS if name != "arb-deep" for kind in KINDS_OF_UPDATE],
        lambda name, *kind: name == "tiny" or kind == KINDS_OF_UPDATE[0],
    ),
)
def test_prediction_equals_the_state_of_every_preset(name, rule, direction):
    config = preset(name, rule=rule, direction=direction)
    assert measure(model_of(config)).bytes_by_area == predicted_bytes(config)


@pytest.mark.parametrize("options", [
    {"digits": "all"}, {"digits": "fade"}, {"rule": "votes", "votes_fixes": ("scales",)},
    {"mlp_rule": "carry"},
])  # fmt: skip
def test_all_rules_are_predicted_for_any_weights(options):
    config = preset("tiny", **TINY, **options)
    tokens = set_symbol_directions(dataclasses.replace(config, vocabulary=5000))
    choices = {(c.rule, c.scale_type): c.state_bytes for c in what_if(tokens).choices}
    assert choices.keys() == {*itertools.product(RULES, SCALE_TYPES)}
    if "mlp_rule" not in options:
        assert choices[tokens.rule, "T32"] == predict(tokens).total.state_bytes


@pytest.mark.parametrize("shape", [TINY, RAGGED], ids=["tiny", "ragged"])
def test_weights_and_padding_are_counted_as_stored(shape):
    config = preset("tiny", **shape)
    report = predict(config)
    tensors = [part for part in model_of(config).modules() if isinstance(part, TernaryTensor)]
    weights = sum(tensor.num_weights for tensor in tensors)
    assert report.total.weights == weights
    assert report.total.padding_trits == sum(5 * t.trits.numel() for t in tensors) - weights
    assert report.trained_weights == sum(t.num_weights for t in tensors if not t.frozen)


def test_frozen_norms_are_trits_and_scales_only():
    norms = predict(preset("tiny", direction="factored")).areas["norms"]
    assert {kind for kind in KINDS if norms.bytes_by_kind[kind]} == {"trits", "scales"}


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 3.34), ("small", 10.8), ("base", 85.3), ("1b", 1234), ("hnet-tiny", 2.99),
     ("hnet-small", 10.98), ("hnet-base", 85.5), ("hnet-every", 84.9), ("hnet-two-stage", 93.4)],
)  # fmt: skip
def test_presets_have_their_size(name, millions):
    assert predict(preset(name)).trained_weights / 1e6 == pytest.approx(millions, rel=2e-3)


@dataclasses.dataclass(slots=True)
class Slotted:
    """Has no dictionary of attributes."""

    kept: object


CONTAINERS = {
    "itself": lambda x: x, "list": lambda x: [1, x], "tuple": lambda x: (None, x),
    "dictionary": lambda x: {"_kept": x}, "set": lambda x: {x},
    "frozen set": lambda x: frozenset([x]), "queue": lambda x: deque([x], maxlen=2),
    "object": lambda x: SimpleNamespace(_kept=x), "slots": Slotted,
    "nested": lambda x: [{"_a": (SimpleNamespace(__b=[Slotted(x)]),)}],
}  # fmt: skip


@pytest.mark.parametrize("name", ["cache", "_cache", "__cache", "_parameters_of", "training_"])
def test_measure_sees_a_tensor_by_any_name_in_any_container(name):
    """So do buffers, parameters and submodules, whatever they are called."""
    model = model_of(preset("tiny", **TINY), "cpu")
    before, owners = measure(model).state_bytes, (model, model.head, model.blocks[0].mlp)
    number = 0
    for owner in owners:
        for container in CONTAINERS.values():
            number += 1
            setattr(owner, f"{name}{number}", container(torch.zeros(3)))
    measured = measure(model)
    assert measured.float_attributes == 3 * number
    model.norm.register_buffer(name, torch.zeros(5))
    model.head.register_parameter(name, torch.nn.Parameter(torch.zeros(7)))
    model.register_module(name, torch.nn.Linear(2, 3, bias=False))
    measured = measure(model)
    float_counts = (measured.float_attributes, measured.float_buffers, measured.float_parameters)
    assert float_counts == (3 * number, 5, 7 + 6)
    assert measured.state_bytes - before == 4 * sum(float_counts)


def test_measure_takes_large_integers_outside_buffers_for_state():
    model = model_of(preset("tiny", **TINY), "cpu")
    before = measure(model)
    model.head.key = torch.zeros(100, dtype=torch.int32)
    model.head.master = torch.zeros(100_000, dtype=torch.int32)
    measured = measure(model)
    assert measured.counter_bytes - before.counter_bytes == 400
    assert measured.state_bytes - before.state_bytes == 400_000
    assert measured.bytes_by_area["other"]["other"] == 400_000
    model.head.master = torch.zeros(2**11, dtype=torch.int64)  # by bytes, of 16 KiB at most
    assert measure(model).counter_bytes - before.counter_bytes == 400 + 2**14
    model.head.master = torch.zeros(2**11 + 1, dtype=torch.int64)
    assert measure(model).counter_bytes - before.counter_bytes == 400

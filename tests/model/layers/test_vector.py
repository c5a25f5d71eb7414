"""Packed vectors and taps: their first values, which do not decay."""

import pytest
import torch
from states import assert_same, state_of

from arbcli.config.presets import preset
from arbcli.model.layers.vector import TernaryVector
from arbcli.model.updater import Updater

VALUES = (-6.9, -0.01, 1e-3, 1.0, 2.77, 40.0)
KINDS = [
    {"rule": rule, "digits": digits}
    for rule, digits in (
        ("moment", "trit"), ("moment", "all"), ("nibble", "trit"), ("nibble", "all"),
        ("carry", "trit"), ("carry", "all"),
    )
]  # fmt: skip


def vector(**options) -> TernaryVector:
    part = TernaryVector(VALUES, preset("tiny", **options).layer_spec(), area="mamba")
    part.weight.initialise(0, 0)
    return part


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_first_values_are_near_the_given_values(options):
    torch.testing.assert_close(vector(**options)(), torch.tensor(VALUES), rtol=0.008, atol=0)


def test_first_values_of_votes_are_powers_of_two():
    values = vector(rule="votes", direction=None)()
    assert ((values / torch.tensor(VALUES)).log2().abs() <= 0.51).all()


def test_vector_does_not_decay():
    states = []
    for weight_decay in (0.0, 200.0):
        weight = vector(digits="all").weight
        updater = Updater([weight], 3, torch.float32, weight_decay=weight_decay)
        updater.begin(0, 0.02)
        updater(weight, torch.linspace(-1, 1, len(VALUES))[:, None])
        states.append(state_of(weight))
    assert_same(*states)

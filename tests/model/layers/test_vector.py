"""Packed vectors and taps: their first values, and the gradient of taps."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.model.layers.vector import TernaryVector

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

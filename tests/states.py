"""States of models, by name, which are compared bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in module.state_dict().items()}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.model.build import build_model
from arbcli.model.packed import TernaryTensor
from arbcli.train.updater import Updater


def factors(**given) -> dict[str, float]:
    with torch.device("meta"):
        model = build_model(preset("tiny", layers=1, heads=2, ffn=32, **given), torch.float32)
    return {
        name: part.lr_factor
        for name, part in model.named_modules()
        if isinstance(part, TernaryTensor) and not part.frozen
    }


@pytest.mark.parametrize(("direction", "inner"), [("factored", 0.5), ("sign", 0.5), (None, 1)])
def test_wide_model_takes_smaller_steps(direction, inner):
    """At four times the width of `small`: half of its steps where elements of a step are alike."""
    found = factors(dim=1536, direction=direction)
    assert found.pop("embedding.weight") == 1
    assert found.pop("head.weight") == 0.125
    assert set(found.values()) == {inner}
    assert len(found) == 4


def test_small_takes_the_steps_of_its_rule():
    found = factors(dim=384, direction="factored")
    assert found.pop("head.weight") == 0.25
    assert set(found.values()) == {1}


def test_tensor_steps_by_its_factor(tensor_steps):
    whole, half = tensor_steps(1.0, 1.0), tensor_steps(1.0, 0.5)
    other = tensor_steps(0.5, 1.0)
    assert torch.equal(half[0], whole[0])
    assert torch.equal(half[1], other[1])
    assert not torch.equal(half[1], whole[1])


@pytest.fixture
def tensor_steps():
    """Step two tensors of a model that differ in their factor; return the remainders."""

    def step(lr_of_first: float, factor_of_second: float) -> list[torch.Tensor]:
        config = preset("tiny", rule="carry", direction="sign")
        tensors = [
            TernaryTensor(8, 16, config, area="", lr_factor=factor)
            for factor in (1.0, factor_of_second)
        ]
        updater = Updater(tensors, 0, torch.float32)
        updater.begin(0, lr_of_first)
        for index, tensor in enumerate(tensors):
            tensor.initialise(0, index)
            updater(tensor, torch.linspace(-1, 1, 128).view(8, 16))
        return [tensor.remainder for tensor in tensors]

    return step

"""Weight decay of integers: at its rate, and not of vectors with given values."""

import pytest
import torch

from arbcli.model.build import build_model
from arbcli.model.layers.vector import VectorWeight
from arbcli.model.updater import Updater
from arbcli.training.configure import new_config
from arbcli.verify.update_reference import state_values

SHAPE = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 8, "device": "cpu"}
LR, STEPS = 0.02, 20


def stepped(weight_decay: float) -> dict[str, tuple[bool, torch.Tensor]]:
    """Step every tensor of a model by random gradients: whether it is a vector, and its z."""
    config = new_config(**SHAPE, streams=2, digits="all", compute="fp32")
    model = build_model(config.model, torch.float32)
    tensors = {n: part for n, part in model.packed_tensors().items() if not part.frozen}
    updater = Updater(tensors.values(), 3, torch.float32, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        updater.begin(step, LR)
        for tensor in tensors.values():
            updater(
                tensor, torch.randn(tensor.out_features, tensor.in_features, generator=generator)
            )
        updater.finish()
    return {
        name: (isinstance(part, VectorWeight), state_values(part)["z"])
        for name, part in tensors.items()
    }


def test_matrices_shrink_by_a_128th_of_the_rate_times_the_decay_and_vectors_do_not():
    plain, decayed = stepped(0.0), stepped(200.0)
    share = (1 - LR * 200 / 128) ** STEPS  # 0.53
    vectors = 0
    for name, (is_vector, z) in plain.items():
        if is_vector:
            vectors += 1
            assert torch.equal(z, decayed[name][1])
        elif "streams" not in name:  # whose projection is zero at first
            ratio = float(decayed[name][1].norm() / z.norm())
            assert ratio == pytest.approx(share, abs=0.05)  # steps decay for a shorter time
    assert vectors

"""The bare baseline of other families computes what the float baseline computes."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.training.step import total_loss
from benchmarks.bare_families import FamilyModel
from benchmarks.families import FAMILIES

SMALL = {
    "hnet-base": {
        "dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 64, "outer_dim": (16,),
        "outer_heads": (2,), "outer_ffn": (24,), "window": 16,
    },
    "arb-long": {
        "dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 64, "head_width": 16, "rotary": 8,
        "window": 16, "ratios": (4, 16), "top_k": 5,
    },
    "experts": {"dim": 32, "layers": 2, "heads": 2, "ffn": 24, "ctx": 64, "experts": 4},
}  # fmt: skip
"""Sizes of a small model of each family."""
NAMES = {
    "stages.0.encoder": "before", "stages.0.decoder": "after",
    "stages.0.router.query_key": "chunking.router", "stages.0": "chunking",
    "experts.gate.keys": "channel.gate", "experts.gate_up": "channel.up",
    "experts.down": "channel.down", "attention.output": "mixer.out", "attention": "mixer",
    "mlp.gate_up": "channel.up", "mlp.output": "channel.down", "beta.weight": "beta",
    "sink.weight": "sink",
}  # fmt: skip
"""Names of parameters in the bare baseline, by those of the float baseline."""


def small(family):
    _, model = FAMILIES[family]
    shape = {key: value for key, value in model.items() if key != "preset"} | SMALL[family]
    return preset(model["preset"], weights="float", sub_norms=False, **shape)


def named(name):
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_float_baseline(family):
    torch.manual_seed(0)
    config = small(family)
    baseline, bare = build_model(config, torch.float32), FamilyModel(config, torch.float32)
    parameters = dict(bare.named_parameters())
    pairs = []
    for name, weight in baseline.weights().items():
        ours = named(name)
        pairs.append(
            (weight.latent, parameters.pop(ours if ours in parameters else f"{ours}.weight"))
        )
        with torch.no_grad():
            if not weight.latent.any():
                weight.latent.normal_(0, 0.1)
            weight.latent.mul_(30 if name == "head.weight" else 1)  # so that losses differ
            pairs[-1][1].copy_(weight.latent.view_as(pairs[-1][1]))
    assert not parameters
    ids = torch.arange(128).view(2, 64) ** 2 * 5 % 256
    with use_backend("torch"):
        loss = total_loss(baseline.losses(ids, 255 - ids), baseline.loss_weights)
        loss.backward()
    bare_loss = bare(ids, 255 - ids)
    bare_loss.backward()
    assert float(bare_loss) == pytest.approx(float(loss), rel=1e-4)
    for theirs, ours in pairs:
        wanted = theirs.grad.view_as(ours)
        assert (ours.grad - wanted).norm() < 1e-4 * wanted.norm()

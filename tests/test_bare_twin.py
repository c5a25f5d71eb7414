"""The bare twin is the float twin without sub-norms, and its Muon orthogonalises."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.model.build import build_model
from benchmarks.bare_twin import LR, Model, orthogonalise, step_by_muon

NAMES = {
    "attention.qkv": "qkv", "attention.output": "out", "mlp.gate_up": "up", "mlp.output": "down",
}  # fmt: skip


def test_loss_is_that_of_the_float_twin():
    shape = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 32}
    twin = build_model(preset("tiny", weights="float", sub_norms=False, **shape), torch.float32)
    twin.initialise(0)
    state = twin.state_dict()
    state["head.weight.latent"].mul_(30)  # so that losses differ where anything does
    bare = Model(64, 2, 2, 96, 32)
    taken = {"embedding.weight": state["embedding.weight.latent"],
             "head.weight": state["head.weight.latent"]}  # fmt: skip
    for index in range(2):
        for name, ours in NAMES.items():
            taken[f"blocks.{index}.{ours}.weight"] = state[f"blocks.{index}.{name}.weight.latent"]
    bare.load_state_dict(taken | {"cos": bare.cos, "sin": bare.sin})
    ids = torch.arange(64).view(2, 32) * 5 % 256
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [twin.loss(ids, 255 - ids), bare(ids, 255 - ids)]
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=2e-3)  # one is in bf16


def test_muon_steps_along_orthogonal_matrices():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(48, 32, generator=generator) for _ in range(3)]
    values = torch.linalg.svdvals(orthogonalise(torch.stack(gradients)).float())
    assert values.min() > 0.5
    assert values.max() < 1.4
    weights = [torch.zeros(48, 32) for _ in range(3)]
    moments = torch.zeros(3, 48, 32)
    step_by_muon(weights, gradients, moments)
    assert torch.equal(moments, torch.stack(gradients))
    along = [float((w * g).sum()) for w, g in zip(weights, gradients, strict=True)]
    assert all(value < 0 for value in along)
    assert float(weights[0].abs().max()) < 0.2 * 48**0.5 * LR

"""The baselines' optimizers against torch's own, and a baseline that is compiled or captured."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import EAGER_STEPS
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.training.compiled_baseline import FUSED_BLOCKS
from arbcli.training.configure import new_config
from arbcli.training.float_optimizer import BETAS, CLIP_NORM, FloatOptimizer, Muon
from arbcli.training.trainer import Trainer

WEIGHT_DECAY = 0.1
SHAPES = [(24, 40), (40, 24), (24, 40), (16, 16), (24, 40)]
MUON_ERROR = 2**-5
"""Of a step, relative: a batch's products may be added in another order than a matrix's. Then the
results of 15 products differ by a unit of bf16, 2**-8, here and there, and each of the five steps
of Newton-Schulz multiplies the difference of small singular values by up to 3.4. 0.011 was seen.
"""
SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 16}


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


def test_muon_in_batches_steps_as_torchs_own():
    ours = [torch.nn.Parameter(matrix) for matrix in matrices(0)]
    theirs = [torch.nn.Parameter(matrix.clone()) for matrix in ours]
    lr = torch.zeros(())
    muon = Muon(ours, lr, WEIGHT_DECAY, compiled=False)
    expected = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        before = [matrix.detach().clone() for matrix in ours]
        for matrix, start in zip(theirs, before, strict=True):
            matrix.data.copy_(start)
        for mine, other, grad in zip(ours, theirs, matrices(step + 1), strict=True):
            mine.grad, other.grad = grad.clone(), grad.clone()
        lr.fill_(0.1 / (step + 1))
        expected.param_groups[0]["lr"] = 0.1 / (step + 1)
        muon.step()
        expected.step()
        for mine, other, start in zip(ours, theirs, before, strict=True):
            assert distance(mine - start, other - start) < MUON_ERROR
    momenta = {tuple(m.shape): m for m in muon.momenta}
    assert set(momenta) == {(3, 24, 40), (1, 40, 24), (1, 16, 16)}
    buffers = [expected.state[theirs[i]]["momentum_buffer"] for i in (0, 2, 4)]
    assert torch.allclose(momenta[3, 24, 40], torch.stack(buffers), atol=1e-6)


def twin(recompute: bool = False, **given) -> LanguageModel:
    config = preset("tiny", **SHAPE | given, weights="float")
    return build_model(config, torch.float32, recompute=recompute)


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def test_adamw_steps_as_torchs_own_with_a_number_for_a_rate():
    mine, other = twin(), twin()
    optimizer = FloatOptimizer(mine, "adamw", WEIGHT_DECAY)
    parameters = list(other.parameters())
    expected = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=WEIGHT_DECAY)
    for step in range(3):
        mine.loss(*windows()).backward()
        for ours, theirs in zip(mine.parameters(), parameters, strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.clone()  # AdamW magnifies last bits of small gradients
        optimizer.set_step(step, 0.01 * (3 - step))
        expected.param_groups[0]["lr"] = 0.01 * (3 - step)
        optimizer.finish()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        expected.step()
        expected.zero_grad()
    for ours, theirs in zip(mine.parameters(), parameters, strict=True):
        assert ours.grad is None
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_muon_leaves_embedding_and_head_to_adamw_without_decay():
    model = twin()
    optimizer = FloatOptimizer(model, "muon", WEIGHT_DECAY)
    model.loss(*windows()).backward()
    optimizer.set_step(0, 0.01)
    optimizer.finish()
    count = sum(parameter.numel() for parameter in model.blocks.parameters())
    assert sum(momentum.numel() for momentum in optimizer._muon.momenta) == count
    (group,) = optimizer._adamw.param_groups
    assert {id(p) for p in group["params"]} == {
        id(model.embedding.weight.latent), id(model.head.weight.latent)
    }  # fmt: skip
    assert group["weight_decay"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layers", [2, FUSED_BLOCKS + 1])
def test_captured_twin_learns_as_the_eager_twin_and_never_waits(optimizer, layers, text):
    shape = SHAPE | {"layers": layers, "batch": 8, "accum": 2, "weights": "float"}
    config = new_config(
        data=[text], device="cuda", lr=0.003, optimizer=optimizer, steps=100, **shape
    )
    texts = open_texts(config.data, None, seed=0, context=16)
    losses = []
    for capture in (False, True):
        trainer = Trainer(config, texts, capture=capture)
        losses.append([float(trainer.train_step()) for _ in range(EAGER_STEPS + 20)])
        assert (trainer._graph is not None) == capture
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < losses[1][0] - 0.5
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

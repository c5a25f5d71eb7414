"""Dropout in training: masks that depend on the place of an element, not on how a step is run."""

from dataclasses import replace

import pytest
import torch
from marks import mostly_slow
from states import assert_same, state_of

from arbcli.base.errors import ArbError
from arbcli.config.parts.attention import AttentionConfig
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.kernels.rows.dropout import dropout as drop
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.layers.attend_dropped import attend_dropped
from arbcli.model.layers.dropout import Dropout, Mask
from arbcli.training.configure import new_config
from arbcli.training.dropout import DropoutKeys
from arbcli.training.trainer import Trainer

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8, "batch": 2}
ABOUT = {"device": "cpu", "compute": "fp32", "seed": 3, "lr": 0.5, "steps": 9, "dropout": 0.25}
ALL_DROPPED = {"dropout": 0.25, "attention_dropout": 0.2, "embedding_dropout": 0.1}


def trainer_of(texts, **options) -> Trainer:
    return Trainer(new_config(**(SHAPE | ABOUT | options)), texts)


def after(texts, steps: int, **options) -> dict[str, torch.Tensor]:
    trainer = trainer_of(texts, **options)
    for _ in range(steps):
        trainer.train_step()
    return state_of(trainer.model)


def test_masks_are_those_of_the_key_forward_and_backward():
    x = torch.randn(2, 5, 33, requires_grad=True)
    key = torch.tensor(-9, dtype=torch.int32)
    y = Dropout(key[None], 0.25, key[None], 0.0, None).drop(0, x)
    grad = torch.randn_like(y)
    y.backward(grad)
    kept = drop(torch.ones(10, 33), key, 0.25).view_as(x)
    assert torch.equal(y, x * kept)
    assert torch.equal(x.grad, grad * kept)
    assert 0.2 < (kept == 0).float().mean() < 0.3


def test_every_branch_micro_batch_and_step_has_a_mask_of_its_own():
    config = new_config(**SHAPE | ABOUT | ALL_DROPPED, accum=3)
    keys = DropoutKeys(config, 4, torch.device("cpu"))
    seen = []
    for step in range(5):
        keys.set_step(step)
        for masks in map(keys.select, range(3)):
            seen += [*masks.keys.tolist(), *masks.attention_keys.tolist(), int(masks.embedding.key)]
    assert len(set(seen)) == len(seen) == 5 * 3 * (4 + 4 + 1)


@pytest.mark.parametrize("has_sink", [False, True])
def test_dropped_attention_is_that_of_float64_with_the_same_mask(has_sink):
    generator = torch.Generator().manual_seed(4)
    q, k, v, grad = (torch.randn(2, 3, 7, 8, generator=generator) for _ in range(4))
    inputs = [part.requires_grad_() for part in (q, k, v)]
    sink = torch.randn(3, generator=generator) if has_sink else None
    key, seen = torch.tensor(11, dtype=torch.int32), torch.ones(7, 7, dtype=torch.bool).tril()
    y = attend_dropped(*inputs, Mask(key, 0.3), seen=seen, sink=sink)
    grads = torch.autograd.grad(y, inputs, grad)

    doubles = [part.detach().double().requires_grad_() for part in inputs]
    scores = (doubles[0] @ doubles[1].mT / 8**0.5).exp() * seen
    total = scores.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.double().exp()[:, None, None]
    kept = drop(torch.ones(2 * 3 * 7, 7), key, 0.3).view(2, 3, 7, 7).double()
    expected = (scores / total * kept) @ doubles[2]
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    for part, others in zip(
        grads, torch.autograd.grad(expected, doubles, grad.double()), strict=True
    ):
        torch.testing.assert_close(part.double(), others, rtol=1e-4, atol=1e-5)
    assert 0.2 < (kept == 0).double().mean() < 0.4


@pytest.mark.parametrize("name", ALL_DROPPED)
def test_each_dropout_changes_training_by_itself_and_not_evaluation(name, texts):
    plain, dropping = (trainer_of(texts, **{"dropout": 0.0, name: rate}) for rate in (0.0, 0.5))
    assert plain.evaluate(2) == dropping.evaluate(2)
    assert float(plain.train_step()) != float(dropping.train_step())
    plain.initialise_from(dropping.checkpoint("text"))
    assert plain.evaluate(2) == dropping.evaluate(2)


@pytest.mark.parametrize("mixer", [
    AttentionConfig(heads=2, kv_heads=1, window=4, query_key_norm="none"),
    AttentionConfig(heads=2, sink=True), LatentAttentionConfig(heads=2, latent=16, rotary=8), None,
], ids=["window", "sink", "latent", "none"])  # fmt: skip
def test_attention_of_every_kind_is_dropped_and_none_is_refused(mixer, texts):
    config = new_config(**SHAPE | ABOUT | {"dropout": 0.0})
    (stage,) = config.model.stages
    block = replace(stage.blocks[0], mixer=mixer)
    model = replace(config.model, stages=(replace(stage, blocks=(block, block)),))
    plain = replace(config, model=model)
    if mixer is None:
        with pytest.raises(ArbError, match="no attention weights that could be dropped"):
            replace(plain, attention_dropout=0.1)
        return
    losses = [
        float(Trainer(replace(plain, attention_dropout=rate), texts).train_step())
        for rate in (0.0, 0.5)
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    "options",
    mostly_slow(
        [ALL_DROPPED, {"reduce_dtype": "int12", "accum": 2}, {"preset": "hnet-small"}], str
    ),
)
def test_resumed_run_has_the_masks_of_one_that_was_not_stopped(options, texts):
    if "preset" in options:
        options = options | {"layers": 1}
    whole = trainer_of(texts, **options)
    for _ in range(2):
        whole.train_step()
    saved = whole.checkpoint("text")
    resumed = trainer_of(texts, **options)
    resumed.restore(saved)
    for trainer in (whole, resumed):
        trainer.train_step()
    assert_same(state_of(whole.model), state_of(resumed.model))


def test_recomputed_blocks_have_the_same_masks(texts):
    options = {"streams": 2, "accum": 2} | ALL_DROPPED
    assert_same(after(texts, 2, **options), after(texts, 2, **options, recompute=True))


ON_GPU = {"device": "cuda", "compute": "bf16", "steps": 8}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {"accum": 2} | ALL_DROPPED,
    {"weights": "float", "optimizer": "muon", "lr": 1e-3} | ALL_DROPPED,
], ids=["packed", "float"])  # fmt: skip
def test_captured_steps_have_the_masks_of_eager_steps(options, texts):
    runs = []
    for capture in (False, True):
        config = new_config(**SHAPE | ABOUT | ALL_DROPPED | options | ON_GPU)
        with deterministic():
            trainer = Trainer(config, texts, capture=capture)
            losses = [float(trainer.train_step()) for _ in range(config.steps)]
        runs.append((losses, state_of(trainer.model)))
        assert trainer.captures == capture
        trainer.release_graph()
    (losses, state), (again, others) = runs
    if "weights" in options:  # compiled, with other roundings
        assert again == pytest.approx(losses, rel=1e-2)
    else:
        assert again == losses
        assert_same(state, others)

"""The field's ways of tuning, that tuning in integers is compared with, step as published."""

from unittest import mock

import pytest
import torch

with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
    from benchmarks.float_qwen import FloatQwen, Shape
    from benchmarks.float_steps import KINDS, WholeStep

SHAPE = Shape(
    layers=2, dim=64, heads=2, kv_heads=1, head_width=32, ffn=64, vocabulary=64, tied=False
)
STEPS = 4


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """To import a compiler takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def tuned(kind: str, steps: int = STEPS, lr: float = 3e-3) -> tuple[WholeStep, list[float]]:
    torch.manual_seed(0)
    model = FloatQwen(SHAPE, torch.bfloat16, recompute=kind == "BAdam", device="cpu")
    whole = WholeStep(model, KINDS[kind](model, lr))
    ids = torch.randint(40, (2, 17), generator=torch.Generator().manual_seed(1))
    return whole, [float(whole(ids[:, :-1], ids[:, 1:])) for _ in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_learns_and_releases_its_gradients(kind):
    whole, losses = tuned(kind, 2 * STEPS)
    assert losses[-1] < losses[0]
    assert all(weight.grad is None for weight in whole.model.parameters())


def test_micro_batches_step_once_by_the_gradient_of_all_windows(monkeypatch):
    steps: list[dict] = []
    monkeypatch.setattr(
        KINDS["bf16 Adafactor"], "function",
        lambda _, weight: lambda *parts: steps[-1].update({weight: parts[1].float().flatten()}),
    )  # fmt: skip
    losses = []
    for accum in (1, 4):
        torch.manual_seed(0)
        model = FloatQwen(SHAPE, torch.bfloat16, recompute=False, device="cpu")
        steps.append({})
        whole = WholeStep(model, KINDS["bf16 Adafactor"](model, 1e-3), accum)
        ids = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
        losses.append(float(whole(ids[:, :-1], ids[:, 1:])))
        assert all(weight.grad is None for weight in model.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    for at_once, added in zip(*map(dict.values, steps), strict=True):
        assert (added - at_once).norm() < 0.02 * at_once.norm()


def test_eight_bits_step_as_bf16_does_within_their_rounding():
    begun = tuned("bf16 AdamW", 0)[0].model
    ways = [tuned(kind)[0].model for kind in ("bf16 AdamW", "bf16 AdamW, eight bits")]
    first, second = (
        torch.cat([(new.float() - old.float()).flatten() for new, old in pairs])
        for pairs in (
            list(zip(model.blocks.parameters(), begun.blocks.parameters(), strict=True))
            for model in ways
        )
    )
    assert torch.cosine_similarity(first, second, dim=0) > 0.95


def test_adapters_leave_the_weights():
    whole, _ = tuned("LoRA 16")
    begun = dict(tuned("LoRA 16", 0)[0].model.named_parameters())
    changed = {
        name
        for name, weight in whole.model.named_parameters()
        if not torch.equal(weight, begun[name])
    }
    assert changed
    assert all(name.startswith("adapters") for name in changed)

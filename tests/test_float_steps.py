"""The field's ways of tuning, that tuning in integers is compared with, step as published."""

from functools import cache

import pytest
import torch

from arbcli.config.site import Site
from arbcli.model.baselines import FloatWeight
from benchmarks.float_qwen import FloatQwen, Shape
from benchmarks.float_steps import KINDS, WholeStep
from benchmarks.low_rates import GROUP, GridSteps

SHAPE = Shape(
    layers=2, dim=64, heads=2, kv_heads=1, head_width=32, ffn=64, vocabulary=64, tied=False
)
STEPS = 4


@pytest.fixture(autouse=True)
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


def tuned(kind: str, steps: int = STEPS, lr: float = 3e-3) -> tuple[WholeStep, list[float]]:
    torch.manual_seed(0)
    model = FloatQwen(SHAPE, torch.bfloat16, recompute=kind == "BAdam", device="cpu")
    whole = WholeStep(model, KINDS[kind](model, lr))
    ids = torch.randint(40, (2, 17), generator=torch.Generator().manual_seed(1))
    return whole, [float(whole(ids[:, :-1], ids[:, 1:])) for _ in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_learns_and_releases_its_gradients(kind):
    whole, losses = tuned(kind, 3 * STEPS)
    assert losses[-1] < losses[0]
    assert all(weight.grad is None for weight in whole.model.parameters())


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


@pytest.mark.parametrize("kind", ["LoRA 256", "LoRA 16"])
def test_adapters_leave_the_weights(kind):
    whole, _ = tuned(kind)
    begun = dict(tuned(kind, 0)[0].model.named_parameters())
    changed = {
        name
        for name, weight in whole.model.named_parameters()
        if not torch.equal(weight, begun[name])
    }
    assert changed
    assert all(name.startswith("adapters") for name in changed)


class OneMatrix(torch.nn.Module):
    """A model of one float matrix, as `GridSteps` finds it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.weight = FloatWeight(32, 64, Site(dim=64, depth=1, ctx=8, weights="float"), std=0.02)
        self.weight.initialise(0, 0)


@cache
def way_of(last: int | None, rounding: str) -> torch.Tensor:
    """How far 400 steps of 0.004 units of 255 levels go, in these, of weights that stay inside."""
    torch.manual_seed(0)
    model = OneMatrix()
    groups = model.weight.latent.detach().unflatten(-1, (-1, GROUP))
    inside = (groups.abs() < 0.94 * groups.abs().amax(-1, keepdim=True)).flatten(-2)
    updates = GridSteps(model, last, rounding)
    updates.begin()
    begun = model.weight.latent.detach().clone()
    grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    for step in range(400):
        model.weight.latent.grad = grad.clone()
        updates.set_step(step, 1e-3)
        updates.finish()
    units = updates.batches[0][1][0][0] * (last or 127) / 127
    return ((model.weight.latent.detach() - begun) / units)[inside]


@pytest.mark.parametrize(("rounding", "last"), [("random", 127), ("turned", 127), ("kept", 382)])
def test_rounding_keeps_the_mean_of_steps_below_a_unit(rounding, last):
    wanted, found = way_of(None, "none"), way_of(last, rounding)
    assert wanted.abs().mean() > 1
    assert (wanted * found).sum() / wanted.square().sum() == pytest.approx(1, abs=0.05)
    noise = (found - wanted).square().mean().sqrt() * last / 127
    # a walk, to whose variance a step of d units adds d at most; or an error within a unit
    assert noise < ((400 * 0.004 * last / 127) ** 0.5 if rounding == "random" else 0.8)

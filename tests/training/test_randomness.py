"""The noise of a run: no two updates share any, and it averages out to the exact steps."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.data.opening import open_texts
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update import (
    blend_moment,
    gradient_gains,
    quantise_gradient,
    step_scales,
    step_trits,
)
from arbcli.model import packed
from arbcli.model import updater as updater_module
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules import find_rule
from arbcli.model.updater import Updater
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

NATIVE = pytest.mark.skipif(not native.available(), reason=native.why_not())
BACKENDS = ("torch", pytest.param("native", marks=NATIVE), pytest.param("interpreter", id="triton"))


@pytest.fixture
def used_keys(monkeypatch) -> list[tuple[str, int]]:
    """Note every key that anything draws from, and what for."""
    used = []

    def spy(module, name, purpose):
        draw = getattr(module, name)

        def noted(keys, *args):
            used.extend((purpose, key) for key in keys.flatten().tolist())
            return draw(keys, *args)

        monkeypatch.setattr(module, name, noted)

    spy(step_scales, "random_bits", "scales")
    spy(gradient_gains, "random_bits", "statistics")
    spy(blend_moment, "random_halves", "moment")
    spy(step_trits, "random_halves", "weights")
    spy(packed, "random_bits", "start")
    spy(quantise_gradient, "random_halves", "wire")
    return used


def purposes(used: list[tuple[str, int]]) -> dict[str, int]:
    return {name: sum(name == other for other, _ in used) for name in dict(used)}


DENSE = {"dim": 16, "layers": 2, "heads": 2, "ffn": 24, "ctx": 8, "batch": 2}


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("shape", ["dense", "graph"])
def test_no_two_draws_of_a_run_have_one_key(shape, wire, used_keys, text, small_graph):
    """Neither of steps, micro-batches, tensors, matrices in one, messages, nor of purposes."""
    dense = shape == "dense"
    options = (DENSE if dense else small_graph) | {"accum": 2, "reduce_dtype": wire}
    backend = {"device": "cpu", "backend": "torch", "direction": None if wire else "factored"}
    config = new_config(data=[text], steps=3, **backend, **options)
    trainer = Trainer(config, open_texts(config.data, None, seed=0, context=config.model.ctx))
    weights = [tensor for tensor in trainer.model.weights().values() if not tensor.frozen]
    tensors, steps = len(weights), 2 if dense else 1
    assert purposes(used_keys) == {"start": tensors}
    for _ in range(steps):
        trainer.train_step()
    # a look at how large gradients are makes zeros of them, which no noise rounds
    used = [pair for pair in used_keys if pair != ("wire", 0)]
    counts = purposes(used)
    if dense:  # each micro-batch updates each tensor once, trits and scales in the last
        updates = {"wire": 2, "moment": 1} if wire else {"statistics": 4, "moment": 2}
        draws = {"scales": 1, "weights": 1} | updates  # what travelled is stepped by once
        expected = {purpose: steps * number * tensors for purpose, number in draws.items()}
        assert counts == {"start": tensors} | expected
    else:  # tables step by the rows that are read, and experts by the tokens that chose them
        assert sum(tensor.matrices for tensor in weights) > tensors
        assert counts["wire" if wire else "scales"] > tensors
    keys = [key for _, key in used]
    assert len(set(keys)) == len(keys)


STEPS = 4
"""Few, as each takes the interpreter a while."""


def constant_run(rule: str, backend: str, monkeypatch) -> TernaryTensor:
    """Step weights of one along a gradient of ones."""
    find = updater_module.gradient_statistics

    def on_torch(*args, **kwargs):
        with use_backend("torch"):
            return find(*args, **kwargs)

    monkeypatch.setattr(updater_module, "gradient_statistics", on_torch)
    tensor = TernaryTensor(
        8, 160, preset("tiny", rule=rule, direction="sign").layer_spec(), area="mlp"
    )
    updater = Updater([tensor], seed=3, dtype=torch.float32)
    tensor.fill(1)
    with use_backend(backend):
        for step in range(STEPS):
            updater.begin(step, LR)
            updater(tensor, torch.ones(8, 160))
    return tensor


def digits_of(tensor: TernaryTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Read z and v, and the moment where there is one, as float64."""
    digits = tensor.rule.digits(tensor.state)
    z = unpack_trits(tensor.trits, 160).double() * RADIX[tensor.rule] + digits["remainder"][0]
    v = tensor.exponent.double() * 128 + tensor.fraction
    return z, v, digits["moment"][0].double() if "moment" in digits else None


LR = 0.15
RADIX = {find_rule("moment"): 64, find_rule("nibble"): 14, find_rule("carry"): 32}


def assert_near(steps: torch.Tensor, mean: float, deviation: float | None = None) -> None:
    """Check the mean, and the spread if it is known, within five standard errors of each."""
    error = (deviation or steps.std().item()) / steps.numel() ** 0.5
    assert error > 0
    assert abs(steps.mean().item() - mean) < 5 * error
    if deviation:
        assert abs(steps.std().item() / deviation - 1) < 5 / (2 * steps.numel()) ** 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_sub_unit_steps_add_up_to_exact_steps(backend, monkeypatch):
    """With noise of its own at every step and element, not only the mean but the spread is right.

    A step of p units, 0 < p < 1, is one of 0 or 1: STEPS of them have the mean STEPS p, and the
    variance STEPS p (1 - p) if they are independent; the same noise at each has STEPS times that.
    """
    z, v, _ = digits_of(constant_run("carry", backend, monkeypatch))
    p = LR * 32 / 16
    assert_near(32 - z, STEPS * p, (STEPS * p * (1 - p)) ** 0.5)
    p = LR * 4
    assert_near(-v, STEPS * p, (STEPS * p * (1 - p)) ** 0.5)


@pytest.mark.parametrize(
    ("rule", "backend"),
    [("moment", "torch"), ("nibble", "torch"), pytest.param("moment", "interpreter", id="triton")],
)
def test_moment_and_its_steps_are_exact_on_average(rule, backend, monkeypatch):
    """The moment is the running mean of the direction; a step is by it over its own size."""
    z, _, moment = digits_of(constant_run(rule, backend, monkeypatch))
    radix, unit = {"moment": (64, 127 / 0.5), "nibble": (14, 7 / 0.6)}[rule]
    assert_near(moment, unit * (1 - 0.9**STEPS))
    # the mean of a moment is a little below its root-mean-square, which rounding makes larger
    moved, step = radix - z, STEPS * LR * radix / 16
    error = 5 * moved.std().item() / z.numel() ** 0.5
    assert 0.95 * step - error < moved.mean().item() < step + error

"""The average of weights: what it averages, and who reads it."""

from types import SimpleNamespace

import pytest
import torch
from made_runs import TINY
from safetensors.torch import load_file
from states import assert_same, state_of

from arbcli.data.opening import open_texts
from arbcli.generation.load import load_named_model, load_weights, read_saved
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.model.averages import average_shift
from arbcli.model.checkpoint import load_checkpoint, save_checkpoint
from arbcli.model.step_parameters import average_rates
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

HORIZON, STEPS = 16, 24
OPTIONS = TINY | {"batch": 4, "warmup": 1, "compute": "fp32", "steps": 200}


@pytest.fixture(scope="module")
def trainer_of(lines):
    def make(**changes) -> Trainer:
        config = new_config(**OPTIONS | changes, data=[lines])
        return Trainer(config, open_texts(config.data, (), seed=0, context=config.model.ctx))

    return make


RULES = [{"digits": "all"}, {"accum": 2, "reduce_dtype": "int16"}, {"rule": "nibble"}]
"""Averages in place of remainders, of trits and remainders in sums of processes, and of nibbles."""


@pytest.fixture(scope="module", params=RULES, ids=str)
def run(request, trainer_of) -> SimpleNamespace:
    """Train a run with an average and one without, and compute the average in float64."""
    averaging = trainer_of(**request.param, weight_average=HORIZON)
    plain = trainer_of(**request.param)
    expected = z_of(averaging)
    assert torch.equal(average_of(averaging), expected.floor())  # before the first step
    errors = []
    for rate in average_rates(range(STEPS), HORIZON):
        averaging.train_step()
        plain.train_step()
        z = z_of(averaging)
        expected += (z - expected) * int(rate) / 2**16
        errors.append(average_of(averaging) - expected)
    return SimpleNamespace(changes=request.param, averaging=averaging, plain=plain,
                           expected=expected, errors=torch.stack(errors))  # fmt: skip


def z_of(trainer: Trainer) -> torch.Tensor:
    """Return z of all weights, in units of their averages."""
    parts = []
    for tensor in trainer.updater.tensors:
        rule = tensor.rule
        below = rule.digits(tensor.state)["remainder"][0]
        z = unpack_trits(tensor.trits, tensor.in_features).double() * rule.radix + below
        parts.append(z.flatten() / 2 ** average_shift(rule))
    return torch.cat(parts)


def average_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([t.average.flatten() for t in trainer.updater.tensors]).double()


def test_rates_are_those_of_a_mean_and_then_of_an_exponential_average():
    rates = average_rates(range(100), 32)  # samples after every second step
    assert rates[:8].tolist() == [2**16, 2**16, 0, 2**15, 0, 2**16 // 3, 0, 2**14]
    assert set(rates[31:].tolist()) == {0, 2**12}
    assert average_rates(range(7, 100), 32).tolist() == rates[7:].tolist()
    assert average_rates(range(100), 3)[2:].tolist() == [2**16 // 3] * 98  # after every step
    assert not average_rates(range(100), 0).any()


def test_average_is_that_of_the_weights_and_changes_none(run):
    z, last = z_of(run.averaging), run.errors[STEPS // 2 :]
    assert torch.equal(z, z_of(run.plain))
    assert last.square().mean().sqrt() < 0.6  # of rounding
    assert last.mean().abs() < 0.05  # rounding has no bias
    assert (z - run.expected).square().mean().sqrt() > 0.5  # it is not just the weights


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_baseline_is_averaged_at_the_same_rates_in_float32(optimizer, trainer_of, tmp_path):
    settings = {"weights": "float", "optimizer": optimizer}
    averaging, plain = trainer_of(**settings, weight_average=HORIZON), trainer_of(**settings)
    expected = [weight.detach().double() for weight in plain.model.parameters()]
    for rate in average_rates(range(STEPS), HORIZON):
        averaging.train_step()
        plain.train_step()
        for average, weight in zip(expected, plain.model.parameters(), strict=True):
            average += (weight - average) * int(rate) / 2**16
    assert_same(state_of(averaging.model), state_of(plain.model))
    with averaging.averaged():
        for weight, average in zip(averaging.model.parameters(), expected, strict=True):
            assert torch.allclose(weight.double(), average, atol=1e-6)
        averages = state_of(averaging.model)
    path = save_checkpoint(tmp_path, averaging.checkpoint("of a text"))
    assert_same(state_of(load_named_model(path, torch.device("cpu"), print)[0]), averages)
    assert_same(state_of(load_weights(path, print).model), averages)
    # a run that starts from it begins its average there, and its optimizer anew
    tuned = trainer_of(**settings, weight_average=HORIZON)
    tuned.initialise_from(read_saved(path, print).checkpoint)
    for name, part in tuned.optimizer.state_dict().items():
        weight, _, kind = name.rpartition(".")
        start = averages[f"{weight}.latent"] if kind == "latent_average" else torch.zeros(())
        assert torch.equal(part, start.expand_as(part))
    # a resumed one has all of it
    tuned.restore(load_checkpoint(path))
    assert float(tuned.train_step()) == float(averaging.train_step())
    assert_same(tuned.checkpoint("").tensors, averaging.checkpoint("").tensors)


def test_evaluations_and_readers_have_the_average(run, trainer_of, tmp_path):
    averaging, plain = run.averaging, run.plain
    before = state_of(averaging.model)
    loss = averaging.evaluate(2)
    assert loss != plain.evaluate(2)
    assert_same(state_of(averaging.model), before)

    path = save_checkpoint(tmp_path, averaging.checkpoint("of a text"))
    assert any(name.endswith(".average") for name in load_file(path))
    checkpoint = read_saved(path, print).checkpoint
    plain.initialise_from(checkpoint)
    assert plain.evaluate(2) == loss
    for tensor in plain.updater.tensors:  # trits are the nearest
        trits, radix = unpack_trits(tensor.trits, tensor.in_features).int(), tensor.rule.radix
        z = trits * radix + tensor.rule.digits(tensor.state)["remainder"][0]
        assert torch.equal(trits, (2 * z > radix).int() - (2 * z < -radix).int())
    reading = load_named_model(path, torch.device("cpu"), print, "fp32")[0]
    exported = load_weights(path, print).model
    ids = torch.arange(12)[None]
    assert torch.equal(reading(ids), plain.model(ids))
    assert torch.equal(exported(ids), reading(ids))
    # a run that starts from it begins its own average there
    tuned = trainer_of(**run.changes, weight_average=HORIZON)
    tuned.initialise_from(checkpoint)
    assert torch.equal(average_of(tuned), z_of(plain).floor())

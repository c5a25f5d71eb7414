"""Learning rates: the default as it always was, to the bit, and what every shape promises."""

import math
from itertools import pairwise

import pytest

from arbcli.config.training import SCHEDULES
from arbcli.train.configure import new_config
from arbcli.train.schedule import learning_rate, schedule


def test_schedule_warms_up_and_ends_at_a_twentieth():
    shares = [schedule(step, 1000, 100) for step in range(1000)]
    assert shares[0] == pytest.approx(0.01)
    assert max(shares) < 1
    assert shares.index(max(shares)) == 99
    assert shares[-1] == pytest.approx(0.05, abs=1e-4)


def test_schedule_warms_up_for_half_of_a_short_run_at_most():
    shares = [schedule(step, 10, 100) for step in range(10)]
    assert shares.index(max(shares)) == 4


@pytest.mark.parametrize("steps", [1, 7, 400, 1311])
def test_default_is_the_cosine_to_the_bit(steps):
    config = new_config(device="cpu", steps=steps, lr=0.6)
    warmup = min(100, steps // 2)
    for step in range(steps):
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        share = rise * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        assert learning_rate(config, step) == 0.6 * share


@pytest.mark.parametrize("final_lr", [0.2, 0.0])
@pytest.mark.parametrize("shape", SCHEDULES)
def test_rate_falls_from_the_first_to_the_final_one(shape, final_lr):
    given = {} if shape == "constant" else {"final_lr": final_lr}
    config = new_config(device="cpu", steps=1000, lr=0.8, warmup=0, schedule=shape, **given)
    rates = [learning_rate(config, step) for step in range(1001)]
    assert rates[0] == 0.8
    assert all(a >= b for a, b in pairwise(rates))
    assert rates[-1] == pytest.approx(given.get("final_lr", 0.8))


def test_stable_rate_falls_in_the_last_fifth():
    shares = [schedule(step, 100, 0, "wsd", 0.1) for step in range(101)]
    assert shares[:81] == [1.0] * 81
    assert shares[90] == pytest.approx(0.55)
    assert schedule(50, 100, 0, "linear", 0.0) == 0.5

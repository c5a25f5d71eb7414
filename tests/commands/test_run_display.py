"""The time left of a run follows from its steps and evaluations, and does not swing."""

from types import SimpleNamespace

import pytest

from arbcli.commands._time_left import TimeLeft
from arbcli.data.text import EVAL_BATCHES


def time_left(steps=100, interval=40, accum=1, step=0) -> TimeLeft:
    model = SimpleNamespace(ctx=64)
    settings = SimpleNamespace(
        steps=steps, eval_interval=interval, accum=accum, batch=8, model=model
    )
    return TimeLeft(settings, step, 0.0)


def test_estimate_has_the_steps_and_the_evaluations_to_come():
    left = time_left()
    now = 0.0
    for step in range(1, 40):
        now += 2.0
        left.stepped(step, now)
    of_evaluation = EVAL_BATCHES / 3 * 2.0  # until one was seen
    assert left.seconds(now) == pytest.approx(61 * 2.0 + 3 * of_evaluation)
    assert left.seconds(now + 1.5) == pytest.approx(left.seconds(now) - 1.5)
    assert left.seconds(now + 99) == pytest.approx(left.seconds(now) - 2.0)
    left.stepped(40, now + 2)
    assert left.seconds(now + 2 + 5) == pytest.approx(60 * 2.0 + 3 * of_evaluation - 5)
    left.evaluated(now + 2 + 7)
    left.resumed(now + 2 + 9)  # a sample of two seconds
    assert left.seconds(now + 2 + 9) == pytest.approx(60 * 2.0 + 2 * 7)
    left.stepped(41, now + 2 + 9 + 2)
    assert left.seconds(now + 2 + 9 + 2) == pytest.approx(59 * 2.0 + 2 * 7)

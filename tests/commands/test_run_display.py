"""The time left of a run follows from its steps and evaluations, and does not swing."""

from types import SimpleNamespace

import pytest

from arbcli.commands import _run_display
from arbcli.commands._run_display import LONG_SECONDS, RunDisplay, fitted
from arbcli.commands._time_left import AVERAGED_SECONDS, WARM_UP_STEPS, TimeLeft


def time_left(steps=100, interval=40, accum=1, step=0) -> TimeLeft:
    return TimeLeft(SimpleNamespace(steps=steps, eval_interval=interval, accum=accum), step, 0.0)


def test_nothing_is_known_before_the_first_step_but_a_bound():
    left = time_left(step=10)
    assert left.seconds(5.0) is None
    assert left.least_seconds(5.0) == 89 * 5.0


def test_run_without_evaluations_has_its_steps_to_come():
    left = time_left(interval=0)
    for step in range(1, 11):
        left.stepped(step, 2.0 * step)
    assert left.seconds(20.0) == pytest.approx(90 * 2.0)
    assert left.seconds(21.0) == pytest.approx(90 * 2.0 - 1.0)


def test_end_is_evaluated_once():
    left = time_left(steps=80)
    for step in range(1, 81):
        left.stepped(step, float(step))
        if step == 40:
            left.evaluated(40.0)
    assert left.seconds(80.0) == 0.0  # one that took none
    left.evaluated(85.0)
    assert left.seconds(85.0) == 0.0
    assert time_left(steps=80, step=40).least_seconds(1.0) == 39


def test_one_slow_step_moves_an_average_little_and_warm_up_not_at_all():
    left, now = time_left(steps=1000, interval=2000), 0.0
    for step in range(1, WARM_UP_STEPS + 2):
        now += 30.0 if step <= WARM_UP_STEPS else 1.0
        left.stepped(step, now)
    before = left.seconds(now) / (1000 - left.step)
    assert before == pytest.approx(1.0, rel=0.02)
    for step in range(left.step + 1, 200):
        now += 1.0
        left.stepped(step, now)
    left.stepped(200, now + 5.0)
    after = left.seconds(now + 5.0) / 800
    assert 1.0 < after < 1 + 5 / AVERAGED_SECONDS + 0.02


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("seconds", "advised"), [(LONG_SECONDS, False), (LONG_SECONDS + 1, True)])
def test_quicker_ways_are_told_of_a_long_run_alone(seconds, advised, known, monkeypatch):
    said = []
    monkeypatch.setattr(_run_display, "note", said.append)
    display = RunDisplay(quiet=False, as_json=False)
    display.tell_estimate()  # nothing has started
    estimates = {"seconds": lambda now: seconds if known else None}
    display._time_left = SimpleNamespace(**estimates, least_seconds=lambda now: seconds)
    display.steps, display._advice = 2000, "a nap"
    display.tell_estimate()
    how = "about" if known else "more than"
    minutes = "15:00" if seconds == LONG_SECONDS else "15:01"
    assert said[0] == f"time    {how} {minutes} to step 2,000"
    assert said[1:] == ["        quicker, from the start: a nap"] * advised


def test_line_has_as_many_parts_as_fit():
    parts = ["step 1/2", "0:10 left", "[##..]", "loss 1.0"]
    for width in range(8, 60):
        line = fitted(parts, width)
        assert len(line) <= width
        assert "  ".join(parts).startswith(line)
    assert fitted(parts, 19) == "step 1/2  0:10 left"
    assert fitted(parts, 18) == "step 1/2"
    assert fitted(parts, 99) == "  ".join(parts)

"""Estimate of a run's remaining time."""

import math
from typing import TYPE_CHECKING

from arbcli.data.text import num_evaluation_batches

if TYPE_CHECKING:
    from arbcli.config.training import TrainConfig

AVERAGED_SECONDS = 60.0
"""Time constant of the exponential average of step times."""
WARM_UP_STEPS = 3
"""First steps, which compile, capture and allocate, and are left out of the average."""


class TimeLeft:
    """Estimates the remaining time from an average of step times and the evaluations to come.

    All methods take `now`, the time of a monotonic clock in seconds.

    Args:
        config: configuration of the run.
        step: number of steps that are done.
        now: time at the start.
    """

    def __init__(self, config: "TrainConfig", step: int, now: float) -> None:
        self._config = config
        self.step = step
        """Number of steps that are done."""
        self._last = now
        self._steps, self._seconds, self._seen = 0.0, 0.0, 0
        self._evaluation_seconds: float | None = None
        self._evaluated_step = step
        # a forward pass takes a third of the time of forward and backward
        batches = num_evaluation_batches(config.batch, config.accum, config.model.ctx)
        self._evaluation_in_steps = batches / 3 / config.accum

    def stepped(self, step: int, now: float) -> None:
        """Record that a step has finished."""
        seconds = now - self._last
        self._seen += 1
        kept = math.exp(-seconds / AVERAGED_SECONDS) if self._seen > WARM_UP_STEPS + 1 else 0.0
        self._steps, self._seconds = kept * self._steps + 1, kept * self._seconds + seconds
        self.step, self._last = step, now

    def evaluated(self, now: float) -> None:
        """Record that an evaluation has finished, which began after the last step."""
        self._evaluation_seconds, self._evaluated_step = now - self._last, self.step

    def resumed(self, now: float) -> None:
        """Exclude the time since the last step, spent on saving or sampling, from the next one."""
        self._last = now

    def seconds(self, now: float) -> float | None:
        """Estimate the remaining seconds; None before the first step has finished."""
        if not self._steps:
            return None
        a_step = self._seconds / self._steps
        an_evaluation = self._evaluation_seconds
        if an_evaluation is None:
            an_evaluation = a_step * self._evaluation_in_steps
        steps, interval = self._config.steps, self._config.eval_interval
        if not interval:  # no evaluations
            return max(0.0, (steps - self.step) * a_step - min(a_step, now - self._last))
        evaluations = 0
        if self._evaluated_step < steps:  # the last step is always evaluated
            evaluations = -(-steps // interval) - self._evaluated_step // interval
        left = (steps - self.step) * a_step + evaluations * an_evaluation
        evaluates = self.step // interval > self._evaluated_step // interval or self.step == steps
        return max(0.0, left - min(an_evaluation if evaluates else a_step, now - self._last))

    def least_seconds(self, now: float) -> float:
        """Return a lower bound of the remaining seconds, before the first step has finished."""
        return (self._config.steps - self.step - 1) * (now - self._last)

"""An estimate of the time that a run still takes."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arbcli.config.training import TrainConfig

AVERAGED_SECONDS = 60.0
"""A step counts e times less for the average when it is so long ago."""
WARM_UP_STEPS = 3
"""Steps that compile, capture and allocate: they are not averaged with later ones."""


class TimeLeft:
    """Averages the time of steps, and adds the evaluations to come.

    Args:
        config: of the run.
        step: steps that are done already.
        now: the time, in seconds, as of every other method.
    """

    def __init__(self, config: "TrainConfig", step: int, now: float) -> None:
        from arbcli.train.trainer import EVAL_BATCHES  # with torch, which is loaded by now

        self._config = config
        self.step = step
        """Steps that are done."""
        self._last = now
        self._steps, self._seconds, self._seen = 0.0, 0.0, 0
        self._of_evaluation: float | None = None
        self._evaluated_step = step
        # a batch forward takes a third of what it takes forward and backward
        self._evaluation_in_steps = EVAL_BATCHES / 3 / config.accum

    def stepped(self, step: int, now: float) -> None:
        """Take in that a step was done."""
        seconds = now - self._last
        self._seen += 1
        kept = math.exp(-seconds / AVERAGED_SECONDS) if self._seen > WARM_UP_STEPS + 1 else 0.0
        self._steps, self._seconds = kept * self._steps + 1, kept * self._seconds + seconds
        self.step, self._last = step, now

    def evaluated(self, now: float) -> None:
        """Take in that an evaluation, which began after the last step, was done."""
        self._of_evaluation, self._evaluated_step = now - self._last, self.step

    def resumed(self, now: float) -> None:
        """Leave out of the next step what was done since the last one: saving, or a sample."""
        self._last = now

    def seconds(self, now: float) -> float | None:
        """Estimate the seconds to the end; None before the first step was done."""
        if not self._steps:
            return None
        of_step = self._seconds / self._steps
        of_evaluation = self._of_evaluation
        if of_evaluation is None:
            of_evaluation = of_step * self._evaluation_in_steps
        steps, interval = self._config.steps, self._config.eval_interval
        if not interval:  # nothing is evaluated
            return max(0.0, (steps - self.step) * of_step - min(of_step, now - self._last))
        evaluations = 0
        if self._evaluated_step < steps:  # the end is evaluated whatever the interval
            evaluations = -(-steps // interval) - self._evaluated_step // interval
        left = (steps - self.step) * of_step + evaluations * of_evaluation
        evaluates = self.step // interval > self._evaluated_step // interval or self.step == steps
        return max(0.0, left - min(of_evaluation if evaluates else of_step, now - self._last))

    def least_seconds(self, now: float) -> float:
        """Bound the seconds to the end from below while the first step is not done."""
        return (self._config.steps - self.step - 1) * (now - self._last)

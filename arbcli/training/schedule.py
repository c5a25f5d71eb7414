"""Schedules of a run by step: learning rate, fading weights, evaluations and records.

The learning rate is a linear warm-up times a decay to the final rate.
"""

import math
from collections.abc import Iterable

from arbcli.config.training import SCHEDULES, TrainConfig
from arbcli.model.rules import STAGES, find_rule

LOG_EVERY = 10
"""Default interval of records in steps; reading a loss synchronises with the GPU."""
FINAL_SHARE = 0.05
"""Default final learning rate, relative to `lr`."""
DECAY_SHARE = 0.2
"""Share of the steps, at the end, in which `wsd` (warm-up, stable, decay) decays."""
SHAPES = {
    "cosine": lambda step, steps: (1 + math.cos(math.pi * step / steps)) / 2,
    "linear": lambda step, steps: 1 - step / steps,
    "wsd": lambda step, steps: min(1.0, (steps - step) / (DECAY_SHARE * steps)),
    "constant": lambda step, steps: 1.0,
}
"""Decay from 1 to 0 as a function of the step and the number of steps."""
assert tuple(SHAPES) == SCHEDULES


def schedule(
    step: int, steps: int, warmup: int, shape: str = "cosine", final: float = FINAL_SHARE
) -> float:
    """Return the factor of the learning rate at a step.

    Args:
        step: number of the step, from 0.
        steps: total number of steps.
        warmup: number of warm-up steps; at most half of `steps` are used.
        shape: a name of `SHAPES`.
        final: final factor; `constant` does not reach it.
    """
    warmup = min(warmup, steps // 2)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return rise * (final + (1 - final) * SHAPES[shape](step, steps))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step."""
    final = FINAL_SHARE if config.final_lr is None else config.final_lr / config.lr
    lr = config.lr * schedule(step, config.steps, config.warmup, config.schedule, final)
    return lr * (1 + (fade_growth(config) - 1) * fade_share(step, config.steps, config.fades))


def fade_growth(config: TrainConfig) -> float:
    """Return the factor of the learning rate after weights have faded; 1 if they do not fade."""
    model = config.model
    return find_rule(model.rule, "fade").fade_growth if model.digits == "fade" else 1.0


def fade_share(step: int, steps: int, fades: tuple[float, float]) -> float:
    """Return the progress of fading at a step, from 0 to 1.

    Args:
        step: number of the step, from 0.
        steps: total number of steps.
        fades: shares of the steps at which fading begins and ends.
    """
    begin, end = fades
    return min(1.0, max(0.0, (step / steps - begin) / (end - begin)))


def fade_stage(step: int, steps: int, fades: tuple[float, float]) -> str:
    """Return the name in `STAGES` at a step; all stages after the first last equally long."""
    return STAGES[math.ceil(fade_share(step, steps, fades) * (len(STAGES) - 1))]


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Return whether a run evaluates held-out text after a step."""
    interval = config.eval_interval
    return interval > 0 and (step == config.steps or (step > 0 and step % interval == 0))


def is_recorded(config: TrainConfig, step: int) -> bool:
    """Return whether an uninterrupted run writes a record after a step."""
    others = filter(None, [config.eval_interval, config.sample_every])
    due = any(step % interval == 0 for interval in [config.log_every or LOG_EVERY, *others])
    return step == config.steps or (step > 0 and due)


class Patience:
    """Counts the evaluations since the lowest held-out loss.

    Args:
        limit: number of evaluations without a lower loss after which a run stops; None never stops.
        losses: steps and held-out losses of the evaluations before, in order.
    """

    def __init__(self, limit: int | None, losses: Iterable[tuple[int, float]] = ()) -> None:
        self._limit = limit
        self.best_step: int | None = None
        """Step of the lowest loss; None before the first one."""
        self.best = float("inf")
        self.last: float | None = None
        """Loss of the last evaluation."""
        self.waited = 0
        """Number of evaluations since the lowest loss."""
        for step, loss in losses:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        """Count an evaluation; a loss that is not finite does not count as lower."""
        self.last, self.waited = loss, self.waited + 1
        if loss < self.best:
            self.best_step, self.best, self.waited = step, loss, 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the run should stop."""
        return self._limit is not None and self.waited >= self._limit

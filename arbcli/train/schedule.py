"""Schedules: the learning rate, and the stages of weights that fade.

The rate is a linear warm-up times a shape that ends at the final rate.
"""

import math

from arbcli.config.training import SCHEDULES, TrainConfig
from arbcli.rules import STAGES, find_rule

FINAL_SHARE = 0.05
"""Of the learning rate, where no final one is given."""
DECAY_SHARE = 0.2
"""Of the steps, at the end, in which `wsd` (warm-up, stable, decay) decays."""
SHAPES = {
    "cosine": lambda step, steps: (1 + math.cos(math.pi * step / steps)) / 2,
    "linear": lambda step, steps: 1 - step / steps,
    "wsd": lambda step, steps: min(1.0, (steps - step) / (DECAY_SHARE * steps)),
    "constant": lambda step, steps: 1.0,
}
"""From a step, of so many, to what falls from 1 to 0."""
assert tuple(SHAPES) == SCHEDULES


def schedule(
    step: int, steps: int, warmup: int, shape: str = "cosine", final: float = FINAL_SHARE
) -> float:
    """Compute the share of the learning rate at `step` of `steps`.

    Args:
        step: from 0.
        steps: of the run.
        warmup: steps of the rise, at most half of the run.
        shape: a name of `SHAPES`.
        final: the share at the end; `constant` never comes near it.
    """
    warmup = min(warmup, steps // 2)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return rise * (final + (1 - final) * SHAPES[shape](step, steps))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Compute the learning rate of a step of a run."""
    final = FINAL_SHARE if config.final_lr is None else config.final_lr / config.lr
    lr = config.lr * schedule(step, config.steps, config.warmup, config.schedule, final)
    return lr * (1 + (fade_growth(config) - 1) * fade_share(step, config.steps, config.fades))


def fade_growth(config: TrainConfig) -> float:
    """Find what the learning rate is multiplied by once weights have faded; 1 if they do not."""
    model = config.model
    return find_rule(model.rule, "fade").fade_growth if model.digits == "fade" else 1.0


def fade_share(step: int, steps: int, fades: tuple[float, float]) -> float:
    """Find how far the fading is at `step` of `steps`.

    Args:
        step: from 0.
        steps: of the run.
        fades: shares of the steps up to which it is 0, and after which it is 1.
    """
    begin, end = fades
    return min(1.0, max(0.0, (step / steps - begin) / (end - begin)))


def fade_stage(step: int, steps: int, fades: tuple[float, float]) -> str:
    """Find what weights are at `step` of `steps`: the later `STAGES` take equal turns."""
    return STAGES[math.ceil(fade_share(step, steps, fades) * (len(STAGES) - 1))]

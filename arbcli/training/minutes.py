"""Minutes of training to a number of steps, by timing a few of them."""

import dataclasses
import time

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime.device import EAGER_STEPS
from arbcli.training.trainer import Trainer

MAX_MINUTES = 60 * 24 * 366
TIMED_STEPS = 20
"""Maximum number of steps that are timed, and discarded."""
TIMED_SHARE = 0.1
"""Maximum share of the minutes for the timed steps."""
TIMED_BATCHES = 4
"""Number of batches of an evaluation that are timed."""


def check_minutes(minutes: float | None) -> None:
    """Check a duration in minutes; None is valid.

    Raises:
        ArbError: it is not positive, or exceeds `MAX_MINUTES`.
    """
    if minutes is not None and not 0 < minutes <= MAX_MINUTES:
        raise ArbError(f"`--minutes` is {minutes}", f"use a number up to {MAX_MINUTES:,}")


def steps_that_fit(minutes: float, trainer: Trainer, started: float) -> int:
    """Return the number of steps that fit into `minutes`; collective, the same in all processes.

    The time for the timed steps and for evaluations is subtracted.

    Args:
        minutes: training time.
        trainer: a trainer at step 0, which is then of no further use.
        started: time before the trainer was built, by `time.perf_counter`.
    """
    config, seconds = trainer.config, minutes * 60
    for _ in range(EAGER_STEPS + 1 if trainer.captures else 1):
        loss = trainer.train_step()
    float(loss)  # synchronises with the GPU
    timing_start, num_timed = time.perf_counter(), 0

    def is_enough() -> bool:
        return num_timed > 0 and time.perf_counter() - started >= TIMED_SHARE * seconds

    while num_timed < TIMED_STEPS and not any(trainer.group.agree(is_enough())):
        loss = trainer.train_step()
        num_timed += 1
    float(loss)
    timing_end = time.perf_counter()
    if config.eval_interval:
        trainer.evaluate(TIMED_BATCHES)
    trainer.release_graph()
    now = time.perf_counter()
    step_seconds = (timing_end - timing_start) / num_timed
    evaluation_seconds = (now - timing_end) * trainer.num_evaluation_batches / TIMED_BATCHES
    training_seconds = seconds - (now - started)
    steps = max(1, int(training_seconds / step_seconds))
    for _ in range(3):  # the number of evaluations depends on the number of steps
        interval = dataclasses.replace(config, steps=steps).eval_interval
        evaluations = -(-steps // interval) if interval else 0
        steps = max(1, int((training_seconds - evaluations * evaluation_seconds) / step_seconds))
    return trainer.group.broadcast_object(steps)

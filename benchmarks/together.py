"""Train several models on one GPU at once, each on a stream of its own.

A step of a small model leaves most of a GPU idle, and a process takes its time to start. No bit is
another than of a run by itself: steps are CUDA graphs that share nothing.
"""

from collections.abc import Callable, Sequence

import torch

from arbcli.training.schedule import Patience
from arbcli.training.trainer import Trainer

AHEAD = 8
"""Rounds of steps that the host may be ahead of the GPU."""


def train_together(
    trainers: Sequence[Trainer],
    every: int | None = None,
    evaluate: Callable[[Trainer], float] = Trainer.evaluate,
) -> list[dict[int, float]]:
    """Train every model to its end, or until the patience of its configuration is exhausted.

    Args:
        trainers: of one GPU, which capture their steps, at step 0.
        every: steps between evaluations; None evaluates at the end only.
        evaluate: computes the held-out loss of a trainer's model.

    Returns:
        Held-out losses of each, in nats a symbol, by the number of steps; the last is the end's.
    """
    curves: list[dict[int, float]] = [{} for _ in trainers]
    patiences = [Patience(trainer.config.patience) for trainer in trainers]
    streams = [torch.cuda.Stream() for _ in trainers]
    torch.cuda.synchronize()
    for step in range(max(trainer.config.steps for trainer in trainers)):
        for trainer, stream, patience in zip(trainers, streams, patiences, strict=True):
            if step < trainer.config.steps and not patience.is_exhausted:
                _step(trainer, stream)
        if step % AHEAD == 0:
            torch.cuda.synchronize()
        for trainer, losses, patience in zip(trainers, curves, patiences, strict=True):
            if _is_due(trainer, every) and trainer.step not in losses:
                torch.cuda.synchronize()
                losses[trainer.step] = evaluate(trainer)
                patience.add(trainer.step, losses[trainer.step])
        if all(patience.is_exhausted for patience in patiences):
            break
    for trainer in trainers:
        trainer.release_graph()
    return curves


def _is_due(trainer: Trainer, every: int | None) -> bool:
    """Whether a model is evaluated after the step that it is at."""
    return trainer.step == trainer.config.steps or bool(every and trainer.step % every == 0)


def _step(trainer: Trainer, stream: torch.cuda.Stream) -> None:
    """Run one step: a graph's replay on its stream, or a step without a graph exclusively."""
    if trainer._graph is not None:
        with torch.cuda.stream(stream):
            trainer.train_step()
        return
    torch.cuda.synchronize()
    # a stream has its own workspace of cuBLAS, which graphs that run at once must not share
    torch.cuda.graph.default_capture_stream = None
    trainer.train_step()
    torch.cuda.synchronize()

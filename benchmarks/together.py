"""Train several models on one GPU at once, each on a stream of its own.

A step of a small model leaves most of a GPU idle, and a process takes its time to start. No bit is
another than of a run by itself: steps are CUDA graphs that share nothing.
"""

from collections.abc import Sequence

import torch

from arbcli.training.trainer import Trainer

AHEAD = 8
"""Rounds of steps that the host may be ahead of the GPU."""


def train_together(trainers: Sequence[Trainer], every: int | None = None) -> list[dict[int, float]]:
    """Train every model to its end.

    Args:
        trainers: of one GPU, which capture their steps, at step 0.
        every: steps between evaluations; None evaluates at the end only.

    Returns:
        Held-out losses of each, in nats a symbol, by the number of steps; the last is the end's.
    """
    found: list[dict[int, float]] = [{} for _ in trainers]
    streams = [torch.cuda.Stream() for _ in trainers]
    torch.cuda.synchronize()
    for step in range(max(trainer.config.steps for trainer in trainers)):
        for trainer, stream in zip(trainers, streams, strict=True):
            if step < trainer.config.steps:
                _step(trainer, stream)
        if step % AHEAD == 0:
            torch.cuda.synchronize()
        for trainer, losses in zip(trainers, found, strict=True):
            if _is_due(trainer, every) and trainer.step not in losses:
                torch.cuda.synchronize()
                losses[trainer.step] = trainer.evaluate()
    for trainer in trainers:
        trainer.release_graph()
    return found


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

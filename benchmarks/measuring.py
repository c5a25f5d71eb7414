"""Shared set-up of benchmarks: a text, trainers, memory, and rounds and processes in turns."""

import atexit
import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch

from arbcli.data.opening import open_texts
from arbcli.model.baselines import FloatWeight
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer


class Trained(Protocol):
    """Something that makes training steps: a trainer, or a baseline in plain PyTorch."""

    def train_step(self) -> Any:
        """Make one step."""


@cache
def text() -> Path:
    """Write Python's own source as one file, whose windows are drawn faster than from thousands."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    source = open_texts(None, None, seed=0, context=1).train
    path = Path(folder.name) / "text"
    path.write_bytes(source.read(0, len(source)))
    return path


def trainer_of(options: dict[str, Any], capture: bool = True) -> Trainer:
    """Make a trainer of a GPU on Python's own source."""
    settings: dict[str, Any] = {"steps": 10_000, "device": "cuda", "data": [str(text())]}
    config = new_config(**settings | options)
    texts = open_texts(config.data, None, seed=0, context=config.model.ctx)
    with drawn_on_device():
        return Trainer(config, texts, capture=capture)


def drawn_on_device() -> AbstractContextManager:
    """Draw weights of baselines where they are: by default a CPU does, 8 s for those of `1b`."""
    return mock.patch.object(FloatWeight, "initialise", _draw)


@torch.no_grad()
def _draw(weight: FloatWeight, seed: int, index: int) -> None:
    weight.latent.normal_(0, weight.std)


def empty() -> None:
    """Free unused memory, and reset the peaks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait() -> None:
    """Wait for a GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any]) -> float:
    """Time a call, with all that it queues on a GPU."""
    wait()
    started = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - started


def run_steps(trainer: Trained, steps: int) -> float:
    """Run training steps; return the seconds per step."""

    def run() -> None:
        for _ in range(steps):
            trainer.train_step()

    return seconds_of(run) / steps


def bytes_per_second(more: Callable[[int], None], length: int) -> float:
    """Time the generation of some bytes."""
    return length / seconds_of(lambda: more(length))


def in_turns(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Call functions in rounds, one after another; return the results of each over the rounds."""
    results = [[measure() for measure in measures] for _ in range(rounds)]
    return [list(values) for values in zip(*results, strict=True)]


READY = "ready"


def wait_turn() -> None:
    """Wait, in a process of `measured`, until no other one measures."""
    print(READY, flush=True)
    input()


def measured(
    commands: Iterable[Sequence[str]], at_once: int = 2
) -> Iterator[dict[str, Any] | None]:
    """Start some commands at once, let each measure when it is its turn, and read its row.

    Args:
        commands: each calls `wait_turn`, and then prints a JSON object.
        at_once: so many prepare, and the next ones after all of them have measured.

    Yields:
        The object of each, in their order; None if it failed.
    """
    commands = [*commands]
    for first in range(0, len(commands), at_once):
        yield from _measured(commands[first : first + at_once])


def _measured(commands: Sequence[Sequence[str]]) -> Iterator[dict[str, Any] | None]:
    started = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for words in commands
    ]
    for process in started:
        _read(process, READY)
    for process in started:
        row = None
        if process.poll() is None:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            row = _read(process, "{")
        process.wait()
        yield json.loads(row) if row else None


def _read(process: subprocess.Popen, beginning: str) -> str | None:
    """Read lines up to one that begins so; None if there is none."""
    assert process.stdout is not None
    return next((line for line in process.stdout if line.startswith(beginning)), None)

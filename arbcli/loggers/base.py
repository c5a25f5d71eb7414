"""Base of loggers: observers of a run that log numbers, histograms and text."""

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.runtime.backend import row_chunks, use_backend
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import TernaryTensor
from arbcli.train.record import Record, TrainReport
from arbcli.train.run import Observer
from arbcli.train.trainer import Trainer

PROJECT = "arb"
"""Project name, for loggers that have projects."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values are in each bin."""

    edges: list[float]
    """One more than bins."""
    counts: list[int]


class Logger(Observer):
    """Hands on what a run tells.

    The first failure of its package, such as of a network, is told and is the last thing it does:
    the run goes on.

    Args:
        tell: is told of a failure.
    """

    name: str

    def __init__(self, tell: Callable[[str], None] = lambda message: None) -> None:
        self.tell = tell
        self.failed = False
        self._trainer: Trainer | None = None

    @abstractmethod
    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Begin, or go on after `step` steps.

        Args:
            run: its directory, which may have files of the logger's.
            step: steps done.
            facts: what `config.json` says.
        """

    @abstractmethod
    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Hand on numbers of a step."""

    @abstractmethod
    def histograms(self, step: int, values: dict[str, Histogram]) -> None:
        """Hand on histograms of a step."""

    @abstractmethod
    def text(self, step: int, text: str) -> None:
        """Hand on a sample of what the model writes."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""

    def started(self, run: Path | None, trainer: Trainer, facts: dict[str, Any]) -> None:
        """Begin."""
        self._trainer = trainer

        def begin() -> None:
            if run is None:
                raise ValueError("a run that is not saved has no directory")
            self.open(run, trainer.step, facts)

        self._guarded(begin)

    def recorded(self, record: Record) -> None:
        """Hand on a record, and histograms of the state where held-out text was evaluated."""

        def log() -> None:
            self.scalars(record.step, numbers(record))
            trainer = self._trainer
            if record.val_loss is not None and trainer is not None:
                with use_backend(trainer.config.backend):
                    found = state_histograms(trainer.model)
                self.histograms(record.step, found)
            if record.sample is not None:
                self.text(record.step, record.sample)

        self._guarded(log)

    def ended(self, report: TrainReport) -> None:
        """Hand on the sample, and close."""

        def end() -> None:
            if report.sample:
                self.text(report.steps, report.sample)
            self.close()

        self._guarded(end)

    def _guarded(self, work: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout has data only
                work()
        except Exception as error:  # whatever the package raises
            self.failed = True
            self.tell(f"`--log {self.name}` failed, and is left out from here on: {error!r}")


def numbers(record: Record) -> dict[str, float]:
    """List the numbers of a record by name; those of `parts` and `gauges` as `parts/ponder`."""
    values = record.as_json()
    del values["step"], values["sample"]
    for group in ("parts", "gauges"):
        values |= {f"{group}/{name}": value for name, value in values.pop(group).items()}
    return {name: value for name, value in values.items() if value is not None}


def flat_settings(facts: dict[str, Any]) -> dict[str, Any]:
    """List the settings of a run by name; those of its model as `model.rule`."""
    settings = dict(facts["config"])
    model = settings.pop("model")
    return settings | {f"model.{name}": value for name, value in model.items()}


@torch.no_grad()
def state_histograms(model: LanguageModel) -> dict[str, Histogram]:
    """Count trits, and the octaves of scales, of each area of a model; none of a float twin."""
    trits: dict[str, torch.Tensor] = {}
    octaves: dict[str, torch.Tensor] = {}
    for tensor in model.weights().values():
        if not isinstance(tensor, TernaryTensor) or tensor.frozen:
            continue
        for rows in row_chunks(tensor.trits, 1 << 22):
            found = unpack_trits(tensor.trits[rows], tensor.in_features).flatten().long() + 1
            trits[tensor.area] = trits.get(tensor.area, 0) + found.bincount(minlength=3)
        exponents = tensor.exponent.flatten().long() + 128
        octaves[tensor.area] = octaves.get(tensor.area, 0) + exponents.bincount(minlength=256)
    return {f"trits/{area}": _histogram(counts, -1) for area, counts in trits.items()} | {
        f"octaves/{area}": _histogram(counts, -128) for area, counts in octaves.items()
    }


def _histogram(counts: torch.Tensor, first: int) -> Histogram:
    """Bin whole numbers from `first` on, without what is empty at both ends."""
    numbers = counts.tolist()
    used = [index for index, count in enumerate(numbers) if count] or [0]
    begin, end = used[0], used[-1] + 1
    edges = [first + index - 0.5 for index in range(begin, end + 1)]
    return Histogram(edges, numbers[begin:end])

"""Base class of loggers: observers of a run that log scalars, histograms and samples."""

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
from arbcli.training.observer import Observer
from arbcli.training.record import Record, TrainReport
from arbcli.training.trainer import Trainer

PROJECT = "arb"
"""Project name, for loggers that have projects."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of B bins."""

    edges: list[float]
    """Edges of the bins, B + 1 values."""
    counts: list[int]
    """Number of values per bin."""


class Logger(Observer):
    """Base class of loggers.

    If the logger's package fails, for instance by a lost connection, the failure is reported once,
    logging ends, and the run continues.

    Args:
        notify: called with a message if logging fails.
    """

    name: str

    def __init__(self, notify: Callable[[str], None] = lambda message: None) -> None:
        self.notify = notify
        self.failed = False
        self._trainer: Trainer | None = None

    @abstractmethod
    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Start logging, or continue after `step` steps.

        Args:
            run: directory of the run, where the logger may write files.
            step: number of completed steps.
            facts: content of `config.json`.
        """

    @abstractmethod
    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log the scalars of a step by name."""

    @abstractmethod
    def histograms(self, step: int, values: dict[str, Histogram]) -> None:
        """Log the histograms of a step by name."""

    @abstractmethod
    def text(self, step: int, text: str) -> None:
        """Log a sample of the model's text."""

    @abstractmethod
    def close(self) -> None:
        """Flush all data and end logging."""

    def started(self, run: Path | None, trainer: Trainer, facts: dict[str, Any]) -> None:
        """Start logging: see `Observer.started`."""
        self._trainer = trainer

        def begin() -> None:
            if run is None:
                raise ValueError("a run that is not saved has no directory")
            self.open(run, trainer.step, facts)

        self._guarded(begin)

    def recorded(self, record: Record) -> None:
        """Log a record, with histograms of the state if held-out text was evaluated."""

        def log() -> None:
            self.scalars(record.step, scalar_values(record))
            trainer = self._trainer
            if record.val_loss is not None and trainer is not None:
                with use_backend(trainer.config.backend):
                    histograms = state_histograms(trainer.model)
                self.histograms(record.step, histograms)
            if record.sample is not None:
                self.text(record.step, record.sample)

        self._guarded(log)

    def ended(self, report: TrainReport) -> None:
        """Log the last sample, and end logging."""

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
        except Exception as error:  # packages may raise any exception
            self.failed = True
            self.notify(f"`--log {self.name}` failed and is disabled from here on: {error!r}")


def scalar_values(record: Record) -> dict[str, float]:
    """Return the scalars of a record by name; fields of `parts` and `gauges` as `parts/ponder`."""
    values = record.as_json()
    del values["step"], values["sample"]
    for group in ("parts", "gauges"):
        values |= {f"{group}/{name}": value for name, value in values.pop(group).items()}
    return {name: value for name, value in values.items() if value is not None}


def flat_settings(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by name; those of its model as `model.rule`."""
    settings = dict(facts["config"])
    model = settings.pop("model")
    return settings | {f"model.{name}": value for name, value in model.items()}


@torch.no_grad()
def state_histograms(model: LanguageModel) -> dict[str, Histogram]:
    """Compute histograms of trits and of scales' exponents per area; empty for a float baseline."""
    trits: dict[str, torch.Tensor] = {}
    octaves: dict[str, torch.Tensor] = {}
    for tensor in model.weights().values():
        if not isinstance(tensor, TernaryTensor) or tensor.frozen:
            continue
        for rows in row_chunks(tensor.trits, 1 << 22):
            digits = unpack_trits(tensor.trits[rows], tensor.in_features).flatten().long() + 1
            trits[tensor.area] = trits.get(tensor.area, 0) + digits.bincount(minlength=3)
        exponents = tensor.exponent.flatten().long() + 128
        octaves[tensor.area] = octaves.get(tensor.area, 0) + exponents.bincount(minlength=256)
    return {f"trits/{area}": _histogram(counts, -1) for area, counts in trits.items()} | {
        f"octaves/{area}": _histogram(counts, -128) for area, counts in octaves.items()
    }


def _histogram(counts: torch.Tensor, first: int) -> Histogram:
    """Build a histogram of consecutive integers from `first`, without empty bins at both ends."""
    nonzero = counts.nonzero().flatten().tolist() or [0]
    start, stop = nonzero[0], nonzero[-1] + 1
    edges = [first + index - 0.5 for index in range(start, stop + 1)]
    return Histogram(edges, counts[start:stop].tolist())

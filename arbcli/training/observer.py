"""Callbacks of a run: the interface between training and displays, logs and users."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that a display can be defined without importing torch
    from arbcli.training.record import FirstStep, Record, TrainReport
    from arbcli.training.trainer import Trainer


class Observer:
    """Callbacks of a run; the methods do nothing by default."""

    def started(self, run: Path | None, trainer: "Trainer", facts: dict[str, Any]) -> None:
        """Called when a run starts or resumes, at `trainer.step`.

        Args:
            run: directory of the run; None if it is not saved.
            trainer: the trainer.
            facts: contents of `config.json`.
        """

    def first_step(self, first: "FirstStep") -> None:
        """Called after the first step of this process."""

    def stepped(self, step: int) -> None:
        """Called after each step; a GPU may still be computing it."""

    def recorded(self, record: "Record") -> None:
        """Called after a record was written."""

    def noted(self, message: str) -> None:
        """Called with messages for the user."""

    def ended(self, report: "TrainReport") -> None:
        """Called at the end of the run or after a signal, but not after an error."""


class Observers(Observer):
    """Forwards all calls to several observers in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        for name in (name for name in vars(Observer) if not name.startswith("_")):
            callbacks = [getattr(observer, name) for observer in observers]
            setattr(self, name, partial(_call_each, callbacks))


def _call_each(callbacks: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for callback in callbacks:
        callback(*arguments)

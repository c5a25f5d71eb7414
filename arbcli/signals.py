"""SIGINT and SIGTERM: remembered until there is time for them, or raised out of a long call."""

import signal
from collections.abc import Callable
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asked to stop; no `Exception`, so nothing takes it for a fault of its own.

    Args:
        name: of the signal.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Listener:
    """Receives the first stopping signal; a second one has its usual effect."""

    def __init__(self) -> None:
        self._before: dict[int, Callable | int | None] = {}

    def __enter__(self) -> Any:
        for number in STOPPING:
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # only the main thread may listen
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _frame: object) -> None:
        self._restore()
        self._act(signal.Signals(number))

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _act(self, received: signal.Signals) -> None:
        raise NotImplementedError


class RememberedSignal(_Listener):
    """Keeps the signal in `received`, for a loop that looks there between its steps."""

    received: signal.Signals | None = None

    def _act(self, received: signal.Signals) -> None:
        self.received = received


class RaisedSignal(_Listener):
    """Raises `Interrupted` at once, out of whatever is being computed."""

    def _act(self, received: signal.Signals) -> None:
        raise Interrupted(received.name)


def exit_code(name: str) -> int:
    """Find the exit code of a program that a signal of this name has ended."""
    return 128 + signal.Signals[name]

"""Signals that ask to stop: remembered until there is time for them, or raised out of a call.

They are SIGINT, SIGTERM and, of a terminal that is closed, SIGHUP.
"""

import signal
from collections.abc import Callable
from typing import Any

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none
STOPPING = (signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else []))
STOPPED_UNSAVED = 3
"""Exit code of a program that a signal ended before it saved anything."""


class Interrupted(BaseException):
    """A signal asked to stop; no `Exception`, so nothing takes it for a fault of its own.

    Args:
        name: of the signal.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Listener:
    """Receives the first stopping signal; a second one has the effect that it had before.

    But a SIGHUP that comes second has none: a terminal that is closed sends more than one. Where
    it is ignored from the start, as `nohup` has it, it stays so.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable | int | None] = {}

    def __enter__(self) -> Any:
        for number in STOPPING:
            if number == HANGUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # only the main thread may listen
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _frame: object) -> None:
        hangup_before = self._before.get(HANGUP) if HANGUP else None
        self._restore()
        if HANGUP and hangup_before is not None:
            self._before[HANGUP] = hangup_before  # for `__exit__`
            signal.signal(HANGUP, signal.SIG_IGN)
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

"""Handling of the stopping signals SIGINT, SIGTERM and SIGHUP: recorded, or raised."""

import signal
from collections.abc import Callable
from typing import Any

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none
STOPPING = (signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else []))
STOPPED_UNSAVED = 3
"""Exit code of a program that a signal stopped before it saved anything."""


class Interrupted(BaseException):
    """A stopping signal was received; not an `Exception`, so that handlers do not catch it.

    Args:
        name: name of the signal.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class RecordedSignal:
    """Records the first stopping signal in `received`, for a loop that checks it between steps.

    A second signal has its original effect, but a second SIGHUP is ignored, as closing a terminal
    sends several. If SIGHUP is ignored from the start, as under `nohup`, it stays ignored.

    Args:
        confirm: called with the signal immediately, by the signal handler in the main thread.
    """

    received: signal.Signals | None = None

    def __init__(self, confirm: Callable[[signal.Signals], None] = lambda _: None) -> None:
        self._confirm = confirm
        self._previous: dict[int, Callable | int | None] = {}

    def __enter__(self) -> Any:
        for number in STOPPING:
            if number == HANGUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # only the main thread can set handlers
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _frame: object) -> None:
        previous_hangup = self._previous.get(HANGUP) if HANGUP else None
        self._restore()
        if HANGUP and previous_hangup is not None:
            self._previous[HANGUP] = previous_hangup  # for `__exit__`
            signal.signal(HANGUP, signal.SIG_IGN)
        self.received = signal.Signals(number)
        self._confirm(self.received)

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())


class RaisedSignal(RecordedSignal):
    """Raises `Interrupted` immediately."""

    def __init__(self) -> None:
        super().__init__(_interrupt)


def _interrupt(received: signal.Signals) -> None:
    raise Interrupted(received.name)


def exit_code(name: str) -> int:
    """Return the exit code of a program that was stopped by a signal."""
    return 128 + signal.Signals[name]

"""Processes that prepare at once and measure one after another, so that none disturbs another."""

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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

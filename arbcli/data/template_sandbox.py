"""The sandbox of chat templates, which are untrusted code: a process that can do nothing else.

Jinja's own sandbox hides Python's objects, but an expression such as `'x' * 10**10` takes any time
and memory. Charging each operation to a budget takes a model of all of Jinja, so templates run in a
process of their own (`template_program.py`) instead, which the operating system bounds. It has no
files but its pipes, can open none and start no process, and its address space is limited. It is
ended after a time of the processor that grows with the messages; the next template starts another.
Windows has none of these limits: there, only the time until the answer is bounded.
"""

import json
import os
import select
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock, Timer
from typing import Any

from arbcli.base.errors import os_errors

SECONDS = 10.0
"""Seconds of a processor that a template may take without its messages."""
BYTES_PER_SECOND = 2**20
"""Bytes of a template and its messages for each of which it may take another second."""
PATIENCE = 6
"""Limit of the time until an answer, as a multiple of that of the processor."""
MAX_BYTES = 2**30
"""Address space of the process."""
MAX_CHARACTERS = 2**24
"""Maximum length of a template's output."""
MAX_ANSWER_BYTES = 2**28
"""Maximum number of bytes of an answer."""
PROGRAM = Path(__file__).with_name("template_program.py")


class TemplateError(Exception):
    """A template is invalid, refuses its messages, or exceeds a limit; with a reason in words."""


def undeclared_names(source: str) -> list[str]:
    """Return the names of the variables that a template reads.

    Raises:
        TemplateError: it is not a template.
        ArbError: the process cannot be started.
    """
    return _sandbox(os.getpid()).answer(source, None)[0]


def render_template(source: str, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Run a template.

    Args:
        source: source of the template.
        variables: its variables, which are values of JSON.

    Raises:
        TemplateError: the template fails.
        ArbError: the process cannot be started.

    Returns:
        The text, and the first character of each `{% generation %}` block and that after its last.
    """
    text, ranges = _sandbox(os.getpid()).answer(source, variables)
    return text, [(begin, end) for begin, end in ranges]


@cache
def _sandbox(_owner: int) -> "_Sandbox":
    """Return the sandbox of a process by its number; a forked one cannot share its parent's."""
    return _Sandbox()


class _Sandbox:
    """A process that runs templates for threads, from the first request until its pipes close."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Popen | None = None

    def answer(self, source: str, variables: dict[str, Any] | None) -> list[Any]:
        """Return the answer to a request: see `template_program`."""
        given = json.dumps([source, variables])
        seconds = SECONDS + len(given) / BYTES_PER_SECOND
        request = f"[{given}, {seconds}, {MAX_BYTES}, {MAX_CHARACTERS}]\n".encode()
        answer = b""
        with self._lock:
            self._process = self._process or _start()
            try:
                with suppress(OSError):  # it has ended
                    answer = _exchange(self._process, request, PATIENCE * seconds)
            finally:
                if not answer.endswith(b"\n"):  # also after an exception in this thread
                    with suppress(OSError), self._process:
                        self._process.kill()
                    self._process = None
        if not answer.endswith(b"\n"):
            raise TemplateError(f"it takes more than {seconds:.0f} s, or crashes")
        kind, *values = json.loads(answer)
        if kind == "error":
            raise TemplateError(*values)
        return values


def _exchange(process: Popen, request: bytes, seconds: float) -> bytes:
    """Send a request; return the answer, or what there is of it after so many seconds."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    timer = Timer(seconds, process.kill)
    try:
        if sys.platform == "win32":
            timer.start()
        stdin.write(request)
        stdin.flush()
        if sys.platform != "win32":  # takes a fourth of the time of the thread
            poll = select.poll()
            poll.register(stdout, select.POLLIN)
            if not poll.poll(1000 * seconds):
                return b""
        return stdout.readline(MAX_ANSWER_BYTES)
    finally:
        timer.cancel()


def _start() -> Popen:
    """Start the process, in a session that signals of the terminal do not reach."""
    command = [sys.executable, "-I", "-S", str(PROGRAM), *sys.path]
    with os_errors("start", sys.executable, "try again with fewer processes and more memory"):
        return Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True)

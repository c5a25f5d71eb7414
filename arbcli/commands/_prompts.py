"""Reading of prompts for `arb generate`, and the progress of reading a long one."""

import os
import select
import stat
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from arbcli.base.errors import ArbError
from arbcli.base.output import LiveLine, clock
from arbcli.base.reading import open_regular
from arbcli.data.opening import plain_file
from arbcli.families.media.continuing import prompt_and_length

if TYPE_CHECKING:
    from arbcli.model.language_model import LanguageModel

MAX_PROMPT_BYTES = 2**26
"""Maximum size of a prompt, or of a file of prompts."""


def read_prompt(
    file: Path,
    checkpoint: Path,
    model: "LanguageModel",
    keep: float | None,
    length: int | None,
    kinds: Collection[str],
) -> tuple[bytes, int | None]:
    """Read a file as the run reads its texts; see `prompt_and_length` for arguments and result."""
    from arbcli.training.directory import run_conversion

    plain = plain_file(file, run_conversion(checkpoint))
    with open_regular(plain) as source:
        content = source.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise ArbError(
            f"`{file}` has more than {MAX_PROMPT_BYTES:,} bytes", "give a shorter prompt"
        )
    if model.tokenizer is not None and plain != file:
        raise ArbError(
            "a model with a tokenizer only reads text", "give a text file, or use a byte model"
        )
    return prompt_and_length(content, keep, length, kinds)


def read_lines(file: Path) -> list[bytes]:
    """Read the lines of a file, or of stdin for `-`."""
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as source:
            content = source.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ArbError(f"cannot read `{file}`: {why}", "give a file, or - for stdin") from error
    if len(content) > MAX_PROMPT_BYTES:
        raise ArbError(
            f"`{file}` has more than {MAX_PROMPT_BYTES:,} bytes of prompts",
            "split it into several files",
        )
    return content.splitlines()


def stdin_has_data() -> bool:
    """Return whether stdin is a file that is not empty, or a pipe that has data or has ended."""
    try:
        status = os.fstat(0)
    except OSError:  # closed
        return False
    if stat.S_ISREG(status.st_mode):
        return status.st_size > 0
    if not stat.S_ISFIFO(status.st_mode):
        return False
    try:
        return bool(select.select([0], [], [], 0)[0])
    except OSError:  # Windows only waits for sockets
        return False


class PromptProgress:
    """Shows the progress of reading a long prompt, with the remaining time."""

    def __init__(self) -> None:
        self._line, self._stack = LiveLine(), ExitStack()
        self._begun = time.perf_counter()
        self._next = self._begun + 1

    def __enter__(self) -> "PromptProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        self._stack.close()

    def show(self, done: int, size: int) -> None:
        """Show that `done` of `size` symbols are read."""
        now = time.perf_counter()
        if done == size:
            self._stack.close()
        elif now >= self._next:
            if self._next == self._begun + 1:
                self._stack.enter_context(self._line)
            self._next = now + 1
            left = (now - self._begun) * (size - done) / done
            self._line.show_wait(f"read {done:,} of {size:,} of the prompt, {clock(left)} left")

"""All printing. Data goes to stdout, everything said to a person goes to stderr."""

import codecs
import dataclasses
import json
import sys
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def emit(report: object, shown: RenderableType, *, as_json: bool) -> None:
    """Print one report: `shown` for a person, one JSON object for a program."""
    if as_json:
        emit_json(dataclasses.asdict(report))
    else:
        _out.print(shown, markup=False)


def emit_json(value: dict[str, Any]) -> None:
    """Print one JSON object on a line of its own, at once."""
    print(json.dumps(value, allow_nan=False), flush=True)


def write_bytes(data: bytes) -> None:
    """Write bytes to stdout as they are, at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


class TextWriter:
    """Writes text to stdout as its bytes come: whole characters, and U+FFFD for what is none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __enter__(self) -> "TextWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Show a character that was cut off."""
        self._print(self._decoder.decode(b"", final=True))

    def write(self, data: bytes) -> None:
        """Write the characters that are complete, at once."""
        self._print(self._decoder.decode(data))

    def _print(self, text: str) -> None:
        write_bytes(text.encode())


def note(message: str) -> None:
    """Tell a person something on stderr."""
    _err.print(message, markup=False)


def fail(message: str, hint: str | None) -> None:
    """Print an error, and below it what to do about it."""
    _err.print("error: ", style="red", end="")
    _err.print(message, markup=False)  # a shape such as [dim, hidden] is markup to rich
    if hint:
        _err.print("hint: ", style="cyan", end="")
        _err.print(hint, markup=False)


class LiveLine:
    """One line on stderr that is written over, or a line each time where that is no terminal."""

    def __init__(self) -> None:
        self._live = Live(console=_err, auto_refresh=False) if _err.is_terminal else None

    def __enter__(self) -> "LiveLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, text: str, *, keep: bool = False) -> None:
        """Show a line; `keep` leaves it above the next one."""
        if self._live is None or keep:
            note(text)
        else:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def table(title: str, columns: list[str], rows: list[list[str]], *, left: int = 1) -> Table:
    """Lay out a table; all columns but the first `left` are aligned to the right."""
    result = Table(title=Text(title), title_justify="left")
    for index, column in enumerate(columns):
        justify = "left" if index < left else "right"
        result.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def bytes_text(count: int) -> str:
    """Write a number of bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"

"""All printing. Data goes to stdout, everything said to a person goes to stderr.

What cannot be said is dropped: no work is to end because a terminal was closed or a log's disk is
full. Data that cannot be written is an `OutputError`, as a report that nobody gets is a failure.

Names of files, texts, samples and whatever else comes from elsewhere may hold sequences that a
terminal obeys: `printable` shows them instead, and everything said here goes through it.
"""

import codecs
import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from arbcli.errors import ArbError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHUNK_COLOURS = ("cyan", "yellow", "green", "magenta")
CHUNK_MARK = "\u2502"
"""Before a chunk, where there are no colours."""


class OutputError(ArbError):
    """Data cannot be written to stdout; from then on what is written there is dropped.

    Args:
        error: of the operating system.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"cannot write to stdout: {error.strerror or error}", hint="write it to another place"
        )
        self.reader_gone = error.errno == errno.EPIPE
        """Whether the reader of stdout has ended, as `head` does."""


_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but for the tab and the end of a line
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # what changes the order of letters, or lines
    "\ud800-\udfff]"  # bytes of a name that are not UTF-8
)


def printable(text: str) -> str:
    """Write what a terminal would obey, and not show, as the escape that Python has for it."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def _clean(shown: RenderableType) -> RenderableType:
    """Make what is shown printable, down to its parts; tables of `table` are."""
    if isinstance(shown, str):
        return printable(shown)
    if isinstance(shown, Text) and printable(shown.plain) != shown.plain:
        return Text(printable(shown.plain), style=shown.style)
    if isinstance(shown, Group):
        return Group(*map(_clean, shown.renderables))
    return shown


class _Stream:
    """A standard stream for rich, found anew at every use, that drops what it cannot write.

    Args:
        name: `stdout` or `stderr`.
        tells: whether a failure is raised besides, as an `OutputError`.
    """

    def __init__(self, name: str, *, tells: bool) -> None:
        self._name, self._tells = name, tells

    def _find(self) -> TextIO:
        stream = getattr(sys, self._name) or io.StringIO()  # closed, and not opened yet
        return getattr(stream, "rich_proxied_file", stream)  # a live line puts its own in place

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        with self.guarded() as stream:
            encoding = stream.encoding or "utf-8"  # one that lacks a letter shows its escape
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write bytes as they are, at once."""
        with self.guarded() as stream:
            stream.buffer.write(data)
            stream.buffer.flush()

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        with self.guarded() as stream:
            stream.flush()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[TextIO]:
        """Turn a failure to write into silence, from now on."""
        stream = self._find()
        try:
            yield stream
        except OSError as error:
            _silence(stream)
            if self._tells:
                raise OutputError(error) from error

    def isatty(self) -> bool:
        """Return whether a person watches."""
        return self._find().isatty()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._find().fileno()

    @property
    def encoding(self) -> str:
        """Name the encoding."""
        return self._find().encoding


def _silence(stream: TextIO) -> None:
    """Send what is still written to a stream, and what it holds, nowhere."""
    with contextlib.suppress(OSError, ValueError):  # it may have no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_closed_streams() -> None:
    """Open whatever standard stream was closed, as `2>&-` does.

    Else a file of the run would get its descriptor, and what is said would be written there.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


_stdout = _Stream("stdout", tells=True)
_stderr = _Stream("stderr", tells=False)
# rich uses no more of a file than these streams have
_out = Console(file=_stdout, highlight=False)  # type: ignore[arg-type]
_err = Console(file=_stderr, stderr=True, highlight=False, soft_wrap=True)  # type: ignore[arg-type]


def emit(report: "DataclassInstance | None", shown: RenderableType, *, as_json: bool) -> None:
    """Print one report: `shown` for a person, one JSON object for a program."""
    if as_json and report is not None:
        emit_json(dataclasses.asdict(report))
    else:
        _out.print(_clean(shown), markup=False)


def emit_json(value: dict[str, Any]) -> None:
    """Print one JSON object on a line of its own, at once.

    Raises:
        OutputError: it cannot be written.
    """
    _stdout.write(json.dumps(value, allow_nan=False) + "\n")
    _stdout.flush()


def write_bytes(data: bytes) -> None:
    """Write bytes to stdout as they are, at once.

    Raises:
        OutputError: they cannot be written.
    """
    _stdout.write_bytes(data)


def is_terminal() -> bool:
    """Return whether a person types, and reads what is written."""
    return sys.stdin.isatty() and _stdout.isatty()


@contextlib.contextmanager
def typing_dropped() -> Iterator[None]:
    """Hide and discard keys that are pressed within the block, such as before a prompt is shown."""
    try:
        import termios
    except ImportError:  # Windows has none
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    hidden = [*before]
    hidden[3] &= ~termios.ECHO  # of the local modes
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


def read_line(mark: str) -> str | None:
    """Read a line that a person types at a prompt; None at the end of them."""
    try:
        return input(mark)
    except EOFError:
        return None


class TextWriter:
    """Writes text to stdout as its bytes come: whole characters, and U+FFFD for what is none.

    A terminal is shown what it would obey, anything else gets all characters as they are.
    """

    def __init__(self) -> None:
        self._shown = printable if _stdout.isatty() else str
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
        write_bytes(self._shown(text).encode())


def chunked_text(text: bytes, depths: Sequence[int]) -> Text:
    """Show the chunks of a text: in colours on a terminal, else with marks.

    Args:
        text: bytes; those that are not UTF-8 within a chunk are U+FFFD.
        depths: for each byte, how many stages begin a chunk there; so many marks are before it.
            On a terminal the first character of a chunk of chunks is underlined.
    """
    starts = [index for index, depth in enumerate(depths) if depth or not index]
    shown = Text()
    for number, (start, end) in enumerate(pairwise([*starts, len(text)])):
        piece = text[start:end].decode(errors="replace")
        if _out.is_terminal:
            colour = CHUNK_COLOURS[number % len(CHUNK_COLOURS)]
            style = f"underline {colour}" if depths[start] > 1 else colour
            shown.append(printable(piece[:1]), style=style)
            shown.append(printable(piece[1:]), style=colour)
        else:
            shown.append(CHUNK_MARK * depths[start] + piece)
    return shown


def write_chunks(text: bytes, depths: Sequence[int]) -> None:
    """Write a text with its chunks to stdout: see `chunked_text`.

    Raises:
        OutputError: it cannot be written.
    """
    _out.print(chunked_text(text, depths), soft_wrap=True)


def note(message: str) -> None:
    """Tell a person something on stderr, in one line whatever names are in it."""
    _err.print(_one_line(message), markup=False)


def note_text(text: str) -> None:
    """Show a person lines of text on stderr."""
    _err.print(printable(text), markup=False)


def fail(message: str, hint: str | None = None) -> None:
    """Print an error, and below it what to do about it."""
    _err.print("error: ", style="red", end="")
    _err.print(_one_line(message), markup=False)  # a shape such as [dim, hidden] is markup to rich
    if hint:
        _err.print("hint: ", style="cyan", end="")
        _err.print(_one_line(hint), markup=False)


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


PIPE_SECONDS = 30.0
"""Between lines of progress where nothing is written over."""


class LiveLine:
    """A line on stderr that is written over, or a line each time where that is not a terminal.

    One that is written over ends at the width of the terminal; the last one is left there.

    Args:
        moves: whether it is written again every second, as `follow` needs.
    """

    def __init__(self, *, moves: bool = False) -> None:
        self.is_live = _err.is_terminal
        """Whether lines are written over."""
        self._make: Callable[[int], str] = lambda _: ""
        self._follows = self._is_left = False
        self._live = Live(
            console=_err,
            auto_refresh=moves,
            refresh_per_second=1,
            transient=True,
            get_renderable=self._render,
        )

    def __enter__(self) -> "LiveLine":
        if self.is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last line there."""
        if self.is_live:
            self._live.stop()
            if self._is_left:
                note(self._make(self.width))

    @property
    def width(self) -> int:
        """Count the columns of the terminal."""
        return _err.width

    def show(self, text: str, *, keep: bool = False) -> None:
        """Show a line; `keep` leaves it above the next one, and it may be several lines then."""
        if not self.is_live:
            (note_text if keep else note)(text)
        elif keep:
            if not self._follows:
                self._write("")
                self._is_left = False
            note_text(text)
        else:
            self._write(text)
            self._is_left = True

    def follow(self, make: Callable[[int], str]) -> None:
        """Show what `make` returns for the width of the terminal, from now on and every second."""
        if self.is_live:
            self._make, self._follows, self._is_left = make, True, True
            self._live.refresh()

    def show_wait(self, text: str) -> None:
        """Show a person what is waited for, until there is something else to show."""
        if self.is_live:
            self._write(text)
            self._is_left = False

    def _write(self, text: str) -> None:
        self._make, self._follows = lambda _: text, False
        self._live.refresh()

    def _render(self) -> Text:
        return Text(_one_line(self._make(self.width)), no_wrap=True, overflow="ellipsis")


def table(title: str, columns: list[str], rows: list[list[str]], *, left: int = 1) -> Table:
    """Lay out a table; all columns but the first `left` are aligned to the right."""
    result = Table(title=Text(_one_line(title)), title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(
            Text(column), justify="left" if index < left else "right", overflow="fold"
        )
    for row in rows:
        result.add_row(*(Text(printable(cell)) for cell in row))
    return result


def clock(seconds: float) -> str:
    """Write a time as 3:07 or 1:03:07."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def bytes_text(count: int) -> str:
    """Write a number of bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"

"""Terminal output. Results go to stdout, messages and progress to stderr.

Messages that cannot be written are discarded: a closed terminal or a full disk of a log must not
end a run. Results that cannot be written raise `OutputError`.

File names, texts and samples may contain terminal control sequences. `printable` escapes them, and
all messages and tables pass through it.
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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from arbcli.base.errors import ArbError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHUNK_COLOURS = ("cyan", "yellow", "green", "magenta")
CHUNK_MARK = "\u2502"
"""Marks the start of a chunk where colours are unavailable."""


class OutputError(ArbError):
    """A result cannot be written to stdout; all later output to stdout is discarded.

    Args:
        error: the failure that the operating system reported.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"cannot write to stdout: {error.strerror or error}", hint="write it to another place"
        )
        self.reader_gone = error.errno == errno.EPIPE
        """Whether the reader of a pipe has exited, as `head` does."""


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters other than tab and newline
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # bidirectional controls, line separators
    "\ud800-\udfff]"  # surrogate escapes: bytes of a file name that are not UTF-8
)


def printable(text: str) -> str:
    """Replace terminal control characters with their Python escapes."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def _clean(shown: RenderableType) -> RenderableType:
    """Apply `printable` to text, also in groups; `table` already does so for its cells."""
    if isinstance(shown, str):
        return printable(shown)
    if isinstance(shown, Text) and printable(shown.plain) != shown.plain:
        return Text(printable(shown.plain), style=shown.style)
    return Group(*map(_clean, shown.renderables)) if isinstance(shown, Group) else shown


class _Stream:
    """A file object for rich over `sys.stdout` or `sys.stderr` that survives write errors.

    The stream is looked up at each use, as tests and rich replace it. After the first failure all
    further output is discarded.

    Args:
        name: `stdout` or `stderr`.
        raises: whether a failure also raises `OutputError`.
    """

    def __init__(self, name: str, *, raises: bool) -> None:
        self._name, self._raises = name, raises

    def _find(self) -> TextIO:
        stream = getattr(sys, self._name) or io.StringIO()  # None if it was closed at startup
        return getattr(stream, "rich_proxied_file", stream)  # rich.live substitutes a proxy

    def write(self, text: str) -> int:
        """Write text, or discard it after a failure."""
        with self.guarded() as stream:
            encoding = stream.encoding or "utf-8"  # escapes letters that the encoding lacks
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write raw bytes and flush."""
        with self.guarded() as stream:
            stream.buffer.write(data)
            stream.buffer.flush()

    def flush(self) -> None:
        """Flush the buffer, or discard it after a failure."""
        with self.guarded() as stream:
            stream.flush()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[TextIO]:
        """Redirect the stream to the null device if the block fails to write to it.

        Raises:
            OutputError: the write failed, and this stream raises.
        """
        stream = self._find()
        try:
            yield stream
        except OSError as error:
            _silence(stream)
            if self._raises:
                raise OutputError(error) from error

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._find().isatty()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._find().fileno()

    @property
    def encoding(self) -> str:
        """Return the name of the encoding."""
        return self._find().encoding


def _silence(stream: TextIO) -> None:
    """Redirect a stream's buffered and later output to the null device."""
    with contextlib.suppress(OSError, ValueError):  # the stream may have no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def open_closed_streams() -> None:
    """Open standard streams that were closed at startup, as by `2>&-`, on the null device.

    Otherwise the next file that is opened would get their descriptor, and receive their output.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


_stdout = _Stream("stdout", raises=True)
_stderr = _Stream("stderr", raises=False)
# rich only uses those methods of a file that `_Stream` has
_out = Console(file=_stdout, highlight=False)  # type: ignore[arg-type]
_err = Console(file=_stderr, stderr=True, highlight=False, soft_wrap=True)  # type: ignore[arg-type]


def emit(report: "DataclassInstance | None", shown: RenderableType, *, as_json: bool) -> None:
    """Print a report: as one JSON object with `as_json`, else as the rich renderable `shown`."""
    if as_json and report is not None:
        emit_json(dataclasses.asdict(report))
    else:
        _out.print(_clean(shown), markup=False)


def emit_json(value: dict[str, Any]) -> None:
    """Print one JSON object on a line of its own, and flush.

    Raises:
        OutputError: it cannot be written.
    """
    _stdout.write(json.dumps(value, allow_nan=False) + "\n")
    _stdout.flush()


@contextlib.contextmanager
def deferred_stderr() -> Iterator[None]:
    """Defer the block's output to stderr to its end, and drop it if the block raises.

    A Rust library prints several lines about a panic before it raises the exception that is
    reported. The file descriptor is redirected, not Python's streams.
    """
    try:
        previous = os.dup(2)
    except OSError:  # closed
        yield
        return
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(previous, 2)
            os.close(previous)
        output.seek(0)
        with contextlib.suppress(OSError):
            os.write(2, output.read())


def write_bytes(data: bytes) -> None:
    """Write raw bytes to stdout, and flush.

    Raises:
        OutputError: they cannot be written.
    """
    _stdout.write_bytes(data)


def is_terminal() -> bool:
    """Return whether stdin and stdout are both terminals."""
    return sys.stdin.isatty() and _stdout.isatty()


def is_stdout_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return _stdout.isatty()


def read_line(prompt: str) -> str | None:
    """Print a prompt and read a line from the terminal; None at the end of input."""
    try:
        return input(prompt)
    except EOFError:
        return None


class TextWriter:
    """Decodes a stream of UTF-8 bytes to stdout; invalid bytes become U+FFFD.

    On a terminal control characters are escaped; a file or pipe gets all characters unchanged.
    """

    def __init__(self) -> None:
        self._escape = printable if _stdout.isatty() else str
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __enter__(self) -> "TextWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Write an incomplete last character as U+FFFD."""
        self._print(self._decoder.decode(b"", final=True))

    def write(self, data: bytes) -> None:
        """Write the characters that are complete so far, and flush."""
        self._print(self._decoder.decode(data))

    def _print(self, text: str) -> None:
        write_bytes(self._escape(text).encode())


def chunked_text(text: bytes, depths: Sequence[int]) -> Text:
    """Mark the chunks of a text, by colours on a terminal and by `CHUNK_MARK` elsewhere.

    Args:
        text: bytes; those that are not UTF-8 within a chunk become U+FFFD.
        depths: number of stages that begin a chunk at each byte, and of marks before it. On a
            terminal the first character of a chunk of the second stage is underlined.
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
    """Print a message on stderr; newlines in it are escaped."""
    _err.print(_one_line(message), markup=False)


def note_text(text: str) -> None:
    """Print text of several lines on stderr."""
    _err.print(printable(text), markup=False)


def fail(message: str, hint: str | None = None) -> None:
    """Print an error on stderr, and a hint below it."""
    _err.print("error: ", style="red", end="")
    _err.print(_one_line(message), markup=False)  # rich would parse a shape such as [dim, hidden]
    if hint:
        _err.print("hint: ", style="cyan", end="")
        _err.print(_one_line(hint), markup=False)


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


PIPE_SECONDS = 10.0
"""Minimum interval between progress lines if stderr is not a terminal, in seconds."""


class LiveLine:
    """A status line on stderr that is updated in place; off a terminal, each update is a new line.

    On a terminal the line is truncated to the width; the last one stays there.

    Args:
        wait: first temporary line, see `show_wait`; empty for none.
        refreshes: whether the line is rendered every second, as `follow` needs.
    """

    def __init__(self, wait: str = "", *, refreshes: bool = False) -> None:
        self._wait = wait
        self.is_live = _err.is_terminal
        """Whether the line is updated in place."""
        self._format: Callable[[int], str] = lambda _: ""
        self._follows = self._stays = False
        self._next_line = time.monotonic() + PIPE_SECONDS
        self._live = Live(
            console=_err,
            auto_refresh=refreshes,
            refresh_per_second=1,
            transient=True,
            get_renderable=self._render,
        )

    def __enter__(self) -> "LiveLine":
        if self.is_live:
            self._live.start()
        self.show_wait(self._wait)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop updating, and leave the last line on the terminal."""
        if self.is_live:
            self._live.stop()
            if self._stays:
                note(self._format(self.width))

    @property
    def width(self) -> int:
        """Width of the terminal in columns."""
        return _err.width

    def show(self, text: str, *, keep: bool = False) -> None:
        """Show a line; with `keep` it stays above later lines, and may contain newlines."""
        if not self.is_live:
            (note_text if keep else note)(text)
        elif keep:
            if not self._follows:
                self._write("")
                self._stays = False
            note_text(text)
        else:
            self._write(text)
            self._stays = True

    def follow(self, format_line: Callable[[int], str]) -> None:
        """Show the line that `format_line` returns for a width in columns, updated every second."""
        if self.is_live:
            self._format, self._follows, self._stays = format_line, True, True
            self._live.refresh()

    def show_wait(self, text: str) -> None:
        """Show a temporary line, such as `loading`, until the next one; an empty one removes it.

        Off a terminal at most one in `PIPE_SECONDS` is printed.
        """
        if self.is_live:
            self._write(text)
            self._stays = False
        elif text and (now := time.monotonic()) >= self._next_line:
            self._next_line = now + PIPE_SECONDS
            note(text)

    def _write(self, text: str) -> None:
        self._format, self._follows = lambda _: text, False
        self._live.refresh()

    def _render(self) -> Text:
        return Text(_one_line(self._format(self.width)), no_wrap=True, overflow="ellipsis")


def table(title: str, columns: list[str], rows: list[list[str]], *, left: int = 1) -> Table:
    """Build a table of text cells; all columns after the first `left` are right-aligned.

    The header is left out if all headings are empty.
    """
    result = Table(title=Text(_one_line(title)), title_justify="left", show_header=any(columns))
    for index, column in enumerate(columns):
        result.add_column(
            Text(column), justify="left" if index < left else "right", overflow="fold"
        )
    for row in rows:
        result.add_row(*(Text(printable(cell)) for cell in row))
    return result


def clock(seconds: float) -> str:
    """Format a duration as 3:07 or 1:03:07."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def bytes_text(count: int) -> str:
    """Format a number of bytes in MiB, or in KiB if it is smaller than one."""
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"

"""Text from elsewhere is shown on a terminal, and its control codes are not obeyed."""

import io
import os
import re
import sys

import pytest
from rich.console import Console, Group
from rich.text import Text

from arbcli.base import output
from arbcli.base.output import LiveLine, TextWriter, emit, fail, note, printable, table

CLIPBOARD = "\x1b]52;c;cm0gLXJmIC8=\x07"
SHOWN = r"\x1b]52;c;cm0gLXJmIC8=\x07"
OBEYED = {
    CLIPBOARD: SHOWN, "\x1b[2J\x1b[1;1H": r"\x1b[2J\x1b[1;1H",
    "\x9b31m\x7f\x00": r"\x9b31m\x7f\x00", "over\rwritten\b\v\f": r"over\rwritten\x08\x0b\x0c",
    "txt.\u202efdp": r"txt.\u202efdp", "\u2066\u2028\u200f": r"\u2066\u2028\u200f",
    os.fsdecode(b"name \xff"): r"name \udcff", "naïve\tπ\n[bold] \\": "naïve\tπ\n[bold] \\",
}  # fmt: skip


def test_control_characters_are_shown():
    assert {text: printable(text) for text in OBEYED} == OBEYED
    sizes = "1.5 KiB", "1.0 MiB", "2,048.0 MiB"
    assert tuple(map(output.bytes_text, (1536, 2**20, 2**31))) == sizes


class Terminal(io.TextIOWrapper):
    """A stream of bytes that says it is a terminal."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self.buffer.getvalue().decode()


SAY = {
    "note": note,
    "fail": fail,
    "hint": lambda text: fail("a", text),
    "report": lambda text: emit(None, text, as_json=False),
    "group": lambda text: emit(None, Group("a", text), as_json=False),
    "title": lambda text: emit(None, table(text, ["", ""], [["a", "b"]]), as_json=False),
    "cell": lambda text: emit(None, table("a", ["", ""], [["b", text]]), as_json=False),
    "line": lambda text: LiveLine().show(text),
}


@pytest.mark.parametrize("name", SAY)
def test_every_message_is_shown(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    SAY[name](f"a{CLIPBOARD}b shape [dim, 3] of [red]")
    told = "".join(capsys.readouterr())
    assert f"{SHOWN}bshape[dim,3]of[red]" in "".join(told.split())
    assert not {"\x1b", "\x07"} & set(told)


def test_text_of_a_model_is_obeyed_by_no_terminal_and_reaches_a_pipe_as_it_is(monkeypatch):
    for stream, expected in ((Terminal(), f"{SHOWN}\nb"), (io.TextIOWrapper(io.BytesIO()), None)):
        monkeypatch.setattr(sys, "stdout", stream)
        with TextWriter() as writer:
            writer.write(f"{CLIPBOARD}\nb".encode())
        assert stream.buffer.getvalue().decode() == (expected or f"{CLIPBOARD}\nb")


def test_chunks_of_a_text_are_obeyed_by_no_terminal(terminal, monkeypatch):
    monkeypatch.setattr(output, "_out", output._err)
    text = f"a{CLIPBOARD}b".encode()
    output.write_chunks(text, [1, 2, *[0] * (len(text) - 2)])
    told = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())  # colours are ours
    assert told == f"a{SHOWN}b\n"
    emit(None, Group(Text("red\x1b[2J", style="red")), as_json=False)
    assert "\x1b[31mred\\x1b[2J" in terminal.getvalue()


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(
        output, "_err", Console(file=stream, force_terminal=True, highlight=False, width=80)
    )
    return stream


def test_last_line_stays_and_a_wait_line_does_not(terminal):
    with LiveLine() as line:
        line.show("step 10")
    assert terminal.getvalue().endswith("step 10\n")
    with LiveLine() as line:
        line.show_wait("loading")
    assert not terminal.getvalue().endswith("loading\n")


def test_wait_lines_in_a_pipe_are_some_time_apart(capsys, monkeypatch):
    times = iter([0, 9, 10, 19, 21])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(times))
    with LiveLine() as line:
        for number in range(4):
            line.show_wait(f"step {number}")
        line.show_wait("")
    assert capsys.readouterr().err == "step 1\nstep 3\n"


@pytest.mark.parametrize(
    "words", [["generate", "--checkpoint", CLIPBOARD], ["train", "--data", CLIPBOARD],
              ["train", "--resume", CLIPBOARD], ["train", CLIPBOARD], ["train", "--" + CLIPBOARD],
              ["train", "--steps", CLIPBOARD], ["train", "--rule", CLIPBOARD], [CLIPBOARD],
              ["train", "--data", os.fsdecode(b"\xff\x1b")]]
)  # fmt: skip
def test_no_word_of_a_command_line_is_obeyed(words, arb_error):
    assert not {"\x1b", "\x07"} & set(arb_error(*words))


def test_name_with_a_newline_forges_no_error(capsys):
    output.note("text    a\nerror: b.txt (1 file)")
    with output.LiveLine() as line:
        line.show("a\nhint: b")
    output.emit(None, table("a\nerror: b", ["x"], [["y"]]), as_json=False)
    shown = capsys.readouterr()
    for stream in (shown.out, shown.err):
        assert "\\n" in stream
        assert not [line for line in stream.splitlines() if line.startswith(("error", "hint"))]
    output.note_text("two\nlines")
    assert capsys.readouterr().err == "two\nlines\n"


def test_line_that_is_written_over_fits_the_terminal(terminal):
    """One that went on in a second line left parts of itself."""
    with LiveLine() as line:
        line.show("step " + "9" * 200)
        drawn = terminal.getvalue()
        assert "…" in drawn
        assert drawn.count("9") == 80 - len("step …")
    assert terminal.getvalue().replace("\n", "").endswith("9" * 200)


def test_line_that_moves_is_made_for_the_width_and_left_as_it_is_last(terminal):
    numbers = iter(range(99))
    with LiveLine(refreshes=True) as line:
        line.follow(lambda width: f"{next(numbers)} of {width}")
        line.show("an evaluation", keep=True)
        line._live.refresh()
    told = terminal.getvalue()
    assert told.index("0 of 80") < told.index("an evaluation") < told.index("2 of 80")
    assert re.search(r"[0-9]+ of 80\n$", told)

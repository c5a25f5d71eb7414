"""The prompt loop of `arb generate` on a terminal."""

import dataclasses
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from arbcli.output import TextWriter, drop_typed, note, read_line
from arbcli.signals import Interrupted, RaisedSignal

if TYPE_CHECKING:
    from arbcli.infer.generation import Sampling
    from arbcli.model.language_model import LanguageModel

WELCOME = (
    "What you type is continued, after the text so far. An empty line goes on with it. Ctrl-C stops"
    " the text, Ctrl-D ends."
)
MARK = "> "


def chat(
    model: "LanguageModel",
    length: int,
    sampling: "Sampling",
    backend: str,
    kv: str | None = None,
) -> None:
    """Continue what is typed, line after line, until there is no more.

    A line is continued as it is, without a newline behind it; one comes before it. The model sees
    the end of the whole text that fits its context.

    Args:
        model: any `LanguageModel`.
        length: bytes to make each time.
        sampling: how they are chosen; the seed goes up by one each time.
        backend: what runs the kernels.
        kv: what keys and values are kept in.
    """
    from arbcli.infer.generation import generate

    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # lines are edited, and found again by the arrows
    note(WELCOME)
    drop_typed()
    text = b""
    while True:
        try:
            with RaisedSignal():
                line = read_line(MARK)
        except Interrupted as stopped:
            _only_of_a_person(stopped)
            note("")  # a line that was given up
            continue
        if line is None:
            return
        if line and text:
            text += b"\n"
        text += os.fsencode(line)
        seen = (text or b"\n")[-model.config.ctx :]
        made = bytearray()
        try:
            with RaisedSignal(), TextWriter() as writer:
                for part in generate(model, seen, length, sampling, backend=backend, kv=kv):
                    made += part
                    writer.write(part)
        except Interrupted as stopped:
            _only_of_a_person(stopped)
        note("")
        text += made
        sampling = dataclasses.replace(sampling, seed=(sampling.seed + 1) % 2**31)


def _only_of_a_person(stopped: Interrupted) -> None:
    """Let any signal but Ctrl-C end the program."""
    if stopped.name != "SIGINT":
        raise stopped

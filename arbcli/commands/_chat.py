"""The prompt loop of `arb generate` on a terminal."""

import dataclasses
import os
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from arbcli.output import TextWriter, note, read_line
from arbcli.signals import Interrupted, RaisedSignal

if TYPE_CHECKING:
    from arbcli.infer.conversation import Conversation
    from arbcli.infer.generation import Sampling
    from arbcli.model.language_model import LanguageModel

WELCOME = (
    "Your input is appended to the text so far, and the model continues from there. An empty line"
    " continues as it is. Ctrl-C stops the text, Ctrl-D ends."
)
WELCOME_TO_CHAT = "Your input is answered. Ctrl-C stops an answer, Ctrl-D ends."
MARK = "> "


class Continued:
    """A text that goes on: a line is continued as it is, without a newline after it.

    Args:
        context: bytes of the end of the whole text that the model sees.
    """

    ends: Collection[int] = ()

    def __init__(self, context: int) -> None:
        self._context, self._text = context, b""

    def ask(self, said: bytes) -> bytes:
        """Add a line, with a newline before it."""
        self._text += (b"\n" if said and self._text else b"") + said
        return (self._text or b"\n")[-self._context :]

    def answered(self, made: bytes) -> None:
        """Add what the model made of it."""
        self._text += made


def chat(
    model: "LanguageModel",
    length: int,
    sampling: "Sampling",
    backend: str,
    kv: str | None = None,
    conversation: "Conversation | None" = None,
) -> None:
    """Continue what is typed, or answer it, line after line, until there is no more.

    Args:
        model: any `LanguageModel`.
        length: bytes to make each time.
        sampling: how they are chosen; the seed goes up by one each time.
        backend: what runs the kernels.
        kv: what keys and values are kept in.
        conversation: in which lines are messages; None continues them: see `Continued`.
    """
    from arbcli.infer.generation import generate

    text = conversation or Continued(model.config.ctx)

    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # lines are edited, and found again by the arrows
    note(WELCOME_TO_CHAT if conversation else WELCOME)
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
        seen, made = text.ask(os.fsencode(line)), bytearray()
        how: dict[str, Any] = {"backend": backend, "kv": kv, "ends": text.ends}
        try:
            with RaisedSignal(), TextWriter() as writer:
                for part in generate(model, seen, length, sampling, **how):
                    made += part
                    writer.write(part)
        except Interrupted as stopped:
            _only_of_a_person(stopped)
        note("")
        text.answered(bytes(made))
        sampling = dataclasses.replace(sampling, seed=(sampling.seed + 1) % 2**31)


def _only_of_a_person(stopped: Interrupted) -> None:
    """Let any signal but Ctrl-C end the program."""
    if stopped.name != "SIGINT":
        raise stopped

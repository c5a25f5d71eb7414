"""The prompt loop of `arb generate` on a terminal."""

import dataclasses
import os
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from arbcli.base.errors import ArbError
from arbcli.base.output import OutputError, TextWriter, fail, note, read_line
from arbcli.base.signals import Interrupted, RaisedSignal

if TYPE_CHECKING:
    from arbcli.generation.conversation import Conversation
    from arbcli.generation.sampling import Sampling
    from arbcli.model.language_model import LanguageModel

WELCOME = (
    "Your input is appended to the text so far, and the model continues from there. An empty line"
    " continues as it is. Ctrl-C stops the text, Ctrl-D ends."
)
WELCOME_TO_CHAT = "Your input is answered. Ctrl-C stops an answer, Ctrl-D ends."
MARK = "> "


class Continued:
    """A text to which input and output are appended; input gets no newline after it.

    Args:
        model: the model, which reads the last symbols of the text that its context has room for.
    """

    ends: Collection[int] | None = None

    def __init__(self, model: "LanguageModel") -> None:
        self._model, self._text = model, b""

    def ask(self, line: bytes) -> bytes | list[int]:
        """Append a line of input after a newline; return the prompt for the model."""
        from arbcli.generation.tokens import encode_prompt

        self._text += (b"\n" if line and self._text else b"") + line
        context, text = self._model.config.ctx, self._text or b"\n"
        if self._model.tokenizer is None:
            return text[-context:]
        return [*encode_prompt(self._model, text)][-context:]

    def append_answer(self, output: bytes) -> None:
        """Append the model's output."""
        self._text += output


def chat(
    model: "LanguageModel",
    length: int,
    sampling: "Sampling",
    backend: str,
    kv: str | None = None,
    conversation: "Conversation | None" = None,
    ahead: int = 1,
) -> None:
    """Read lines from the terminal and generate a continuation of, or answer to, each.

    Args:
        model: the model that generates.
        length: bytes to generate for each line.
        sampling: parameters of sampling; the seed is incremented after each line.
        backend: kernel backend.
        kv: storage dtype of keys and values; None is that of activations.
        conversation: formats lines as chat messages; None appends them to one text (`Continued`).
        ahead: maximum number of bytes per step: see `Decoder`.
    """
    from arbcli.generation.generation import generate

    text = conversation or Continued(model)

    with suppress(ImportError):  # on Windows
        import readline  # noqa: F401  # gives `input` line editing and history
    note(WELCOME_TO_CHAT if conversation else WELCOME)
    while True:
        try:
            with RaisedSignal():
                line = read_line(MARK)
        except Interrupted as stopped:
            _raise_unless_sigint(stopped)
            note("")  # Ctrl-C discards the line
            continue
        if line is None:
            return
        try:
            seen, output = text.ask(os.fsencode(line)), bytearray()
        except ArbError as error:  # such as a special token in a message
            fail(str(error), error.hint)
            continue
        options: dict[str, Any] = {"backend": backend, "kv": kv, "ends": text.ends, "ahead": ahead}
        try:
            with RaisedSignal(), TextWriter() as writer:
                for part in generate(model, seen, length, sampling, **options):
                    output += part
                    writer.write(part)
        except Interrupted as stopped:
            _raise_unless_sigint(stopped)
        except OutputError:
            raise
        except ArbError as error:  # such as exhausted memory
            fail(str(error), error.hint)
        note("")
        text.append_answer(bytes(output))
        sampling = dataclasses.replace(sampling, seed=(sampling.seed + 1) % 2**31)


def _raise_unless_sigint(stopped: Interrupted) -> None:
    """Raise the interruption again unless it is a Ctrl-C."""
    if stopped.name != "SIGINT":
        raise stopped

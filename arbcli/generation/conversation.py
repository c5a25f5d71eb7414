"""Chats: messages are formatted by the model's template, and answers end at special tokens."""

from collections.abc import Sequence
from pathlib import Path

from arbcli.base.errors import ArbError
from arbcli.base.run_files import TOKENIZER
from arbcli.data.chat_template import Message, missing_template, template_of
from arbcli.data.special_tokens import stop_tokens
from arbcli.model.language_model import LanguageModel


class Conversation:
    """The messages of a chat so far.

    Args:
        model: a model with a tokenizer.
        checkpoint: path of its checkpoint, next to which are its tokenizer and template.
        system: system message, which comes first; None is none.

    Raises:
        ArbError: the chat template is missing or invalid, or `system` contains a special token.
    """

    def __init__(self, model: LanguageModel, checkpoint: Path, system: str | None = None) -> None:
        if model.tokenizer is None:
            raise missing_template(checkpoint.parent)
        self._template = template_of(checkpoint.parent)
        self._tokenizer = model.tokenizer
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append(self._message("system", system.encode(errors="replace")))
        self.ends = {*stop_tokens(model.tokenizer, checkpoint.parent / TOKENIZER)}
        """Tokens that end an answer."""

    def ask(self, message: bytes) -> list[int]:
        """Append a message of the user; return the tokens of the chat up to the next answer.

        Raises:
            ArbError: the message contains a special token, or the template rejects it.
        """
        tokens = self.prompt_tokens(message)
        self.messages.append(self._message("user", message))
        return tokens

    def prompt_tokens(self, message: bytes) -> list[int]:
        """Return the tokens of a chat with this message next, without appending it: see `ask`."""
        messages = [*self.messages, self._message("user", message)]
        return self.encode(self._template.render(messages, add_generation_prompt=True))

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return the text of another chat up to the next answer: see `ask`.

        Args:
            messages: role and content of each message; unpaired surrogates are replaced.
        """
        parts = [[part.encode(errors="replace") for part in message] for message in messages]
        formatted = [self._message(role.decode(), text) for role, text in parts]
        return self._template.render(formatted, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that the template wrote."""
        return [token for token, _ in self._tokenizer.encode_marked(text)]

    def append_answer(self, output: bytes) -> None:
        """Append the model's answer."""
        self.messages.append({"role": "assistant", "content": output.decode(errors="replace")})

    def _message(self, role: str, content: bytes) -> Message:
        """Return a message, whose text must have no special token."""
        text = content.decode(errors="replace")
        if names := [name for name in self._tokenizer.specials if name in text]:
            raise ArbError(f"the message contains the special token `{names[0]}`", "rephrase it")
        return {"role": role, "content": text}

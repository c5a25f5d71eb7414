"""Chats: messages are formatted by the model's template, and answers end at special tokens."""

from pathlib import Path

from arbcli.base.errors import ArbError
from arbcli.base.run_files import TOKENIZER
from arbcli.data.chat_template import Message, template_of, without_template
from arbcli.data.special_tokens import stop_tokens
from arbcli.model.language_model import LanguageModel


class Conversation:
    """The messages of a chat so far.

    Args:
        model: a model with a tokenizer.
        checkpoint: path of its checkpoint, next to which are its tokenizer and template.

    Raises:
        ArbError: the chat template is missing or invalid.
    """

    def __init__(self, model: LanguageModel, checkpoint: Path) -> None:
        if model.tokenizer is None:
            raise without_template(checkpoint.parent)
        self._template = template_of(checkpoint.parent)
        self._tokenizer = model.tokenizer
        self.messages: list[Message] = []
        self.ends = {*stop_tokens(model.tokenizer, checkpoint.parent / TOKENIZER)}
        """Tokens that end an answer."""

    def ask(self, message: bytes) -> list[int]:
        """Append a message of the user; return the tokens of the chat up to the next answer.

        Raises:
            ArbError: the message contains a special token, or the template rejects it.
        """
        text = message.decode(errors="replace")
        if found := [name for name in self._tokenizer.specials if name in text]:
            raise ArbError(
                f"the message contains the special token `{found[0]}`", hint="rephrase it"
            )
        self.messages.append({"role": "user", "content": text})
        written = self._template.render(self.messages, asks=True)
        return [token for token, _ in self._tokenizer.encode_marked(written)]

    def answered(self, made: bytes) -> None:
        """Append the model's answer."""
        text = made.decode(errors="replace")
        self.messages.append({"role": "assistant", "content": text})

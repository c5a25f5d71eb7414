"""A chat with a model: messages to tokens by its template, and the tokens that end an answer."""

from pathlib import Path
from typing import Any

from arbcli.chat_template import Message, template_of, without_template
from arbcli.errors import ArbError
from arbcli.model.language_model import LanguageModel
from arbcli.reading import read_json
from arbcli.run_files import COMPANIONS

GENERATION = "generation_config.json"


class Conversation:
    """Messages so far, and the answers to them.

    Args:
        model: of tokens.
        checkpoint: its path; its tokenizer and what came with it lie next to it.

    Raises:
        ArbError: it has no chat template, or a damaged one.
    """

    def __init__(self, model: LanguageModel, checkpoint: Path) -> None:
        if model.tokenizer is None:
            raise without_template(checkpoint.parent)
        self._template = template_of(checkpoint.parent)
        self._tokenizer = model.tokenizer
        self.messages: list[Message] = []
        self.ends = self._ends(checkpoint.parent / COMPANIONS / GENERATION)
        """Tokens that end an answer."""

    def _ends(self, file: Path) -> set[int]:
        own = self._tokenizer.special(self._template.tokens["eos_token"])
        found: Any = read_json(file, {}).get("eos_token_id") if file.exists() else None
        found = found if isinstance(found, list) else [found]
        return {token for token in [own, *found] if isinstance(token, int)}

    def ask(self, said: bytes) -> list[int]:
        """Add a message, and write all so far as tokens, up to where an answer begins.

        Raises:
            ArbError: it has the text of a special token, or the template refuses it.
        """
        text = said.decode(errors="replace")
        if found := [name for name in self._tokenizer.specials if name in text]:
            raise ArbError(
                f"the message has `{found[0]}`, which is a special token",
                hint="write it differently",
            )
        self.messages.append({"role": "user", "content": text})
        written = self._template.render(self.messages, asks=True)
        return [token for token, _ in self._tokenizer.encode_marked(written)]

    def answered(self, made: bytes) -> None:
        """Add what the model answered."""
        text = made.decode(errors="replace")
        self.messages.append({"role": "assistant", "content": text})

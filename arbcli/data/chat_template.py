"""Chat templates, which format messages as the text that a model was trained on.

A template is untrusted code. It runs in a process of its own (`template_sandbox.py`), which has the
messages, but no Python objects and no files, with bounded time, memory and output.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from arbcli.base.atomic_files import make_folder, write_json, write_text
from arbcli.base.errors import ArbError, optional_module
from arbcli.base.reading import read_small, shown
from arbcli.base.run_files import COMPANIONS, TOKENIZER
from arbcli.data.special_tokens import (
    MAP,
    SETTINGS,
    folders_of,
    read_settings,
    set_special_tokens,
    special_tokens,
)
from arbcli.data.template_sandbox import TemplateError, render_template, undeclared_names

TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"
MAX_TEMPLATE = 2**18
"""Maximum size of a template: of its file in bytes, or of a field of JSON in characters."""
HINT = f"put the model's own `{TEMPLATE}` next to its tokenizer"

Message = Mapping[str, Any]
"""A message: `role`, `content`, and other fields that the template uses."""


class ChatTemplate:
    """A Jinja template with the conventions of Transformers.

    Args:
        source: source of the template.
        name: name of its file, for errors.
        tokens: texts of special tokens by name: see `special_tokens`.

    Raises:
        ArbError: the package jinja2 is missing, or `source` is not a template or takes too long.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str]) -> None:
        self.source, self.name, self.tokens = source, name, dict(tokens)
        optional_module("jinja2", name, "jinja2", "'arb[chat]'")
        with self._errors("is not a chat template"):
            if len(source) > MAX_TEMPLATE:
                raise TemplateError(f"it has more than {MAX_TEMPLATE:,} characters")
            self.variables = frozenset(undeclared_names(source))
            """Names of the variables that the template reads."""

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Format messages as one text: see `render_marked`."""
        return self.render_marked(messages, **options)[0]

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        documents: Any = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Format messages as one text, with the variables that Transformers gives to templates.

        Args:
            messages: messages of a chat in their order.
            add_generation_prompt: whether to end with the beginning of an answer.
            tools: descriptions of functions that may be called; None if there are none.
            documents: texts that answers refer to; None if there are none.

        Raises:
            ArbError: the template refuses the messages, fails, or exceeds a limit.

        Returns:
            The text, and the first character of each `{% generation %}` block and that after its
            last, in order.
        """
        variables = self.tokens | {
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._errors("cannot format these messages"):
            return render_template(self.source, variables)

    @contextmanager
    def _errors(self, problem: str) -> Iterator[None]:
        try:
            yield
        except TemplateError as error:
            raise ArbError(f"`{self.name}` {problem}: {shown(error)}", HINT) from None


def template_digest(template: ChatTemplate | None) -> str:
    """Return the SHA-256 of a template and its special tokens; empty without a template."""
    if template is None:
        return ""
    return sha256(json.dumps([template.source, template.tokens]).encode()).hexdigest()


def keep_template(tokenizer: Path | str, run: Path) -> None:
    """Copy the template and special tokens into a run, unless it has the same.

    Other settings of the tokenizer in the run are kept. What an earlier run left is replaced.

    Raises:
        ArbError: a file is damaged, or cannot be written; or the run has a template, and there is
            none next to the tokenizer.
    """
    template, folder = find_template(tokenizer), run / COMPANIONS
    settings: dict[str, Any] = {}
    try:
        kept_digest = template_digest(find_template(run / TOKENIZER))
        settings = read_settings(folder, SETTINGS)
    except ArbError:  # damaged
        kept_digest = None
    if kept_digest == template_digest(template):
        return
    if template is None:
        raise ArbError(
            f"`{run}` has a chat template, and there is none next to `{tokenizer}`",
            "put the template next to the tokenizer, or choose another `--out`",
        )
    make_folder(folder)
    write_text(folder / TEMPLATE, template.source)
    write_json(folder / SETTINGS, set_special_tokens(settings, template.tokens))
    (folder / MAP).unlink(missing_ok=True)  # it would be read before the settings


def check_template(template: ChatTemplate | None, digest: str | None, run: Path) -> None:
    """Check that a template is the one that a run was trained with.

    Args:
        template: the template in the run.
        digest: its `template_digest` at the start; None for runs of earlier versions.
        run: directory of the run.

    Raises:
        ArbError: the digests differ.
    """
    if digest not in (None, template_digest(template)):
        raise ArbError(
            f"the chat template of `{run}` or its special tokens are not those of its start",
            f"restore `{TEMPLATE}` and `{SETTINGS}` in `{run / COMPANIONS}`",
        )


def find_template(tokenizer: Path | str) -> ChatTemplate | None:
    """Return the chat template next to a tokenizer, or in its folder of companions.

    Args:
        tokenizer: path of a `tokenizer.json`.

    Returns:
        The template; None if there is none.

    Raises:
        ArbError: a file is damaged.
    """
    for folder in folders_of(tokenizer):
        for name, source in template_sources(folder):
            return ChatTemplate(source, name, special_tokens(folder))
    return None


def template_of(run: Path) -> ChatTemplate:
    """Return the chat template of a saved model.

    Args:
        run: folder with its checkpoint and its tokenizer.

    Raises:
        ArbError: the template is missing or damaged.
    """
    template = find_template(run / TOKENIZER)
    if template is None:
        raise missing_template(run)
    return template


def missing_template(run: Path) -> ArbError:
    """Return the error for a saved model without a chat template."""
    return ArbError(
        f"`{run}` has no chat template",
        "leave `--chat` out, or import a model that was trained to chat",
    )


def template_sources(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the file names and sources of a folder's templates, in order of precedence."""
    path, settings = folder / TEMPLATE, read_settings(folder, SETTINGS)
    if path.exists():
        yield str(path), read_small(path, MAX_TEMPLATE, HINT).decode(errors="replace")
    for name, fields in (OLD_TEMPLATE, read_settings(folder, OLD_TEMPLATE)), (SETTINGS, settings):
        source = fields.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = [item for item in source if isinstance(item, dict)]
            source = {item.get("name"): item.get("template") for item in named}.get("default")
        if isinstance(source, str):
            yield str(folder / name), source

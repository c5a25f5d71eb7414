"""Chat templates: how messages become one text, as a model was trained to read it.

A template is a program that anybody may have written. It runs in Jinja's sandbox, which gives it
the messages and no object of Python's, and what it may compute is bounded.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from arbcli.errors import ArbError
from arbcli.reading import open_regular, read_json, shown
from arbcli.run_files import COMPANIONS
from arbcli.tokens import FILE

TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
OLD_TEMPLATE = "chat_template.json"
LARGEST = 2**20
"""Bytes of a template."""
MOST_CHARACTERS = 2**24
"""That a template may write."""
MOST_ROUNDS = 100_000
"""Of all its loops over `range`, and the most that it may repeat a string or pad it to."""
UNBOUNDED = ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill")
"""Methods of strings that make a long one of a short one."""
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Names of tokens that templates write."""
HINT = f"put the model's own `{TEMPLATE}` next to its tokenizer"

Message = Mapping[str, Any]
"""`role` and `content`, and fields that a template knows."""


class ChatTemplate:
    """A template of Jinja, as Transformers has them.

    Args:
        source: the template.
        name: of its file, for errors.
        tokens: texts of special tokens, by the names of `SPECIAL`.

    Raises:
        ArbError: the package jinja2 is missing, or this is not a template.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str]) -> None:
        self.source, self.name, self.tokens = source, name, dict(tokens)
        try:
            jinja = import_module("jinja2")
            sandbox, _ = import_module("jinja2.sandbox"), import_module("jinja2.ext")
        except ImportError:
            raise ArbError(
                f"`{name}` is read with the package jinja2, which is not installed",
                hint="install it: `pip install 'arb[chat]'`",
            ) from None
        self._error = jinja.TemplateError
        environment = _environment(jinja, sandbox)
        try:
            self._template = environment.from_string(source)
        except (jinja.TemplateError, RecursionError, MemoryError) as error:
            raise ArbError(
                f"`{name}` is not a chat template: {_reason(error)}", hint=HINT
            ) from None

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Write messages as one text.

        Args:
            messages: of a chat, in their order.
            asks: whether the beginning of an answer follows.

        Raises:
            ArbError: the template refuses them, or does what no template may.
        """
        given = {name: self.tokens.get(name, "") for name in SPECIAL}
        parts, length = [], 0
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=asks,
                range=_bounded_range(),
                **given,
            ):
                parts.append(part)
                length += len(part)
                if length > MOST_CHARACTERS:
                    raise OverflowError(f"it writes more than {MOST_CHARACTERS:,} characters")
        except Exception as error:  # whatever expressions of the template raise
            raise ArbError(
                f"`{self.name}` cannot write these messages: {_reason(error)}", hint=HINT
            ) from None
        return "".join(parts)


def _environment(jinja: Any, sandbox: Any) -> Any:
    """Make the sandbox that templates run in."""

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """Lets no object change, no attribute of Python's be seen, and no string explode."""

        intercepted_binops = frozenset(("*", "**", "%"))

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, str | bytes) and attr in UNBOUNDED:
                return False
            return super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> None:
            """Take `str.format` for any other method, which `is_safe_attribute` refuses."""

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" or not numbers:
                raise sandbox.SecurityError(f"`{operator}` of these is not allowed")
            return super().call_binop(context, operator, left, right)

    class Generation(jinja.ext.Extension):
        """`{% generation %}`, which marks answers: what is inside is written as it is."""

        tags = frozenset(("generation",))

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def refuse(message: object) -> None:
        raise jinja.TemplateError(str(message))

    environment.globals.clear()
    environment.globals["namespace"] = jinja.utils.Namespace
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    for name in ("center", "format", "indent", "filesizeformat", "random", "wordwrap"):
        environment.filters.pop(name)
    return environment


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=None if indent is None else min(indent, 8))


def _bounded_range() -> Any:
    """Make a `range` whose rounds in all are bounded."""
    left = MOST_ROUNDS

    def bounded(*bounds: int) -> range:
        nonlocal left
        rounds = range(*bounds)
        left -= len(rounds)
        if left < 0:
            raise OverflowError(f"its loops have more than {MOST_ROUNDS:,} rounds")
        return rounds

    return bounded


def _reason(error: BaseException) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__)


def keep_template(tokenizer: Path | str, run: Path) -> None:
    """Copy the template and the names of special tokens into a run that has none.

    Raises:
        ArbError: a file is damaged, or cannot be written.
    """
    template, folder = find_template(tokenizer), run / COMPANIONS
    if template is None or find_template(run / FILE) is not None:
        return
    try:
        folder.mkdir(exist_ok=True)
        (folder / TEMPLATE).write_bytes(template.source.encode())
        (folder / SETTINGS).write_text(json.dumps(template.tokens))
    except OSError as error:
        raise ArbError(
            f"cannot write to `{folder}`: {error.strerror}", hint="choose another `--out`"
        ) from error


def find_template(tokenizer: Path | str) -> ChatTemplate | None:
    """Find the chat template that lies next to a tokenizer, or that came with it.

    Args:
        tokenizer: path of a `tokenizer.json`.

    Returns:
        None if there is none.

    Raises:
        ArbError: a file is damaged.
    """
    for folder in (Path(tokenizer).parent / COMPANIONS, Path(tokenizer).parent):
        settings: dict[str, Any] = {}
        if (folder / SETTINGS).exists():
            settings = read_json(folder / SETTINGS, {})
        tokens = {name: _token(settings.get(name)) for name in SPECIAL}
        for name, source in _sources(folder, settings):
            return ChatTemplate(source, name, tokens)
    return None


def template_of(run: Path) -> ChatTemplate:
    """Find the chat template of a saved model.

    Args:
        run: the folder of its checkpoint and its tokenizer.

    Raises:
        ArbError: there is none, or a damaged one.
    """
    template = find_template(run / FILE)
    if template is None:
        raise without_template(run)
    return template


def without_template(run: Path) -> ArbError:
    """Make the error of a saved model that has none."""
    return ArbError(
        f"`{run}` has no chat template",
        hint="leave `--chat` out, or import a model that was trained to chat",
    )


def _sources(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Find templates of a folder, with the names of their files, the one that counts first."""
    path = folder / TEMPLATE
    if path.exists():
        with open_regular(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ArbError(f"`{path}` has more than {LARGEST:,} bytes", hint=HINT)
        yield str(path), content.decode(errors="replace")
    old = folder / OLD_TEMPLATE
    held = read_json(old, {}).get("chat_template") if old.exists() else None
    for name, found in ((old, held), (folder / SETTINGS, settings.get("chat_template"))):
        if isinstance(found, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in found if is_table(each)}
            found = named.get("default")
        if isinstance(found, str):
            yield str(name), found


def is_table(value: object) -> bool:
    """Return whether a value of JSON is an object."""
    return isinstance(value, dict)


def _token(value: Any) -> str:
    """Read a special token, which is a text or an object with one."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""

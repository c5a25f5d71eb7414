"""Chat templates, which format messages as the text that a model was trained on.

A template is untrusted code. It runs in Jinja's sandbox, which only exposes the messages and no
Python objects, with bounded loops, calls, output and values of variables.
"""

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from arbcli.base.atomic_files import make_folder, write_json, write_text
from arbcli.base.errors import ArbError, optional_module
from arbcli.base.reading import read_json, read_small, shown
from arbcli.base.run_files import COMPANIONS, TOKENIZER
from arbcli.data.special_tokens import (
    MAP,
    SETTINGS,
    folders_of,
    keep_special_tokens,
    read_settings,
    set_special_tokens,
    special_tokens,
)

TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"
LARGEST = 2**20
"""Maximum size of a template in bytes."""
MOST_CHARACTERS = 2**24
"""Maximum length of a template's output."""
MOST_ROUNDS = 2**20
"""Maximum number of iterations of loops, calls and numbers of `range` in one rendering."""
UNBOUNDED = ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill")
"""Methods of strings that can return very long ones, which are forbidden: see `_bounded_format`."""
UNBOUNDED_FILTERS = (
    "batch", "center", "filesizeformat", "format", "indent", "random", "round", "slice", "wordwrap",
)  # fmt: skip
"""Filters of Jinja that can take long, or are not a function of their value."""
WIDEST_FIELD = 64
"""Maximum width and precision of a field of `str.format`."""
WIDEST_INDENT = 8
"""Maximum number of spaces of a level of JSON."""
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
        ArbError: the package jinja2 is missing, or `source` is not a template.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str]) -> None:
        self.source, self.name, self.tokens = source, name, dict(tokens)
        jinja, sandbox, _ = (
            optional_module(module, name, "jinja2", "'arb[chat]'")
            for module in ("jinja2", "jinja2.sandbox", "jinja2.ext")
        )
        self._error = jinja.TemplateError
        self._output = _Output()
        environment = _environment(jinja, sandbox, self._output)
        meta = optional_module("jinja2.meta", name, "jinja2", "'arb[chat]'")
        try:
            parsed = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(parsed))
            """Names of the variables that the template reads."""
            self._template = environment.from_string(_bound(parsed, jinja.nodes))
        except Exception as error:  # the compiler of Python can raise any exception, too
            raise ArbError(f"`{name}` is not a chat template: {_reason(error)}", HINT) from None

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Format messages as one text: see `render_marked`."""
        return self.render_marked(messages, **options)[0]

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        asks: bool = False,
        tools: Any = None,
        documents: Any = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Format messages as one text, with the variables that Transformers gives to templates.

        Args:
            messages: messages of a chat in their order.
            asks: whether to add the generation prompt.
            tools: descriptions of functions that may be called; None if there are none.
            documents: texts that answers refer to; None if there are none.

        Raises:
            ArbError: the template refuses the messages, fails, or exceeds a limit.

        Returns:
            The text, and the first character of each `{% generation %}` block and that after its
            last, in order.
        """
        parts, output = [], self._output
        output.length, output.marks, output.rounds = 0, [], 0
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=asks,
                **self.tokens,
            ):
                parts.append(part)
                output.length += len(part)
                if output.length > MOST_CHARACTERS:
                    raise OverflowError(f"it writes more than {MOST_CHARACTERS:,} characters")
        except Exception as error:  # expressions of the template can raise any exception
            raise ArbError(
                f"`{self.name}` cannot format these messages: {_reason(error)}", HINT
            ) from None
        return "".join(parts), output.marks


class _Output:
    """Length of the text rendered so far, its marked ranges, and the work that it took."""

    length = 0
    """Number of characters."""
    marks: list[tuple[int, int]]
    """Ranges of characters in `{% generation %}` blocks."""
    rounds = 0
    """Number that `MOST_ROUNDS` bounds."""

    def count(self, rounds: int) -> None:
        """Add iterations or calls."""
        self.rounds += rounds
        if self.rounds > MOST_ROUNDS:
            raise OverflowError(f"its loops have more than {MOST_ROUNDS:,} rounds")


def _bound(parsed: Any, nodes: Any) -> Any:
    """Count the rounds of a template's loops, and bound the values of its variables."""

    def filtered(value: Any, name: str) -> Any:
        return nodes.Filter(value, name, [], [], None, None)

    for node in parsed.find_all((nodes.For, nodes.Assign, nodes.AssignBlock, nodes.With)):
        if isinstance(node, nodes.For):
            node.iter = filtered(node.iter, "counted")
        elif isinstance(node, nodes.Assign):
            node.node = filtered(node.node, "bounded")
        elif isinstance(node, nodes.AssignBlock):
            node.filter = filtered(node.filter, "bounded")
        else:
            node.values = [filtered(value, "bounded") for value in node.values]
    return parsed.set_environment(parsed.environment)


def _bounded(value: Any) -> Any:
    """Return a value, unless it is a text or list of too many characters or elements."""
    if isinstance(value, str | list | tuple) and len(value) > MOST_CHARACTERS:
        raise OverflowError(f"a value is longer than {MOST_CHARACTERS:,}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise OverflowError("a number is too large")
    return value


def _environment(jinja: Any, sandbox: Any, output: _Output) -> Any:
    """Create the sandboxed environment of templates."""

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """Sandbox without mutation, Python's attributes, or operations that grow strings."""

        intercepted_binops = frozenset(("*", "**", "%"))

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            output.count(1)
            return _bounded(super().call(__context, __obj, *args, **kwargs))

        def getattr(self, obj: Any, attribute: str) -> Any:
            if isinstance(obj, str) and attribute == "format":
                return _bounded_format(obj)
            return super().getattr(obj, attribute)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, str | bytes) and attr in UNBOUNDED:
                return False
            return super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> None:
            """Treat `str.format` like other methods, which `is_safe_attribute` checks."""

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" or not numbers:
                raise sandbox.SecurityError(f"`{operator}` is not allowed for these values")
            return super().call_binop(context, operator, left, right)

    class Generation(jinja.ext.Extension):
        """The block `{% generation %}`, which marks an answer, with the scope of Transformers'."""

        tags = frozenset(("generation",))

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            block = jinja.nodes.CallBlock(self.call_method("mark"), [], [], body)
            return block.set_lineno(line)

        def mark(self, caller: Any) -> str:
            text = caller()
            output.marks.append((output.length, output.length + len(text)))
            return text

    class Dict:
        """`dict` without its attributes, as in Transformers."""

        def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
            return dict(*pairs, **named)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def refuse(message: object) -> None:
        raise jinja.TemplateError(str(message))

    @jinja.pass_context  # so that it is not evaluated when the template is compiled
    def counted(_: Any, values: Iterable[Any]) -> Any:
        values = _bounded(values) if isinstance(values, Sized) else [*values]
        output.count(len(values))
        return values

    def bounded_range(*bounds: int) -> range:
        rounds = range(*bounds)
        output.count(len(rounds))
        return rounds

    environment.globals.clear()
    environment.globals["range"] = bounded_range
    environment.globals["namespace"] = jinja.utils.Namespace
    environment.globals["dict"] = Dict()
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters |= {"tojson": _to_json, "counted": counted, "bounded": _bounded}
    for name in UNBOUNDED_FILTERS:
        environment.filters.pop(name)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON, with the arguments of Transformers' filter."""
    if indent is not None and not 0 <= indent <= WIDEST_INDENT:
        raise ValueError(f"an indent of {indent} is not in 0..{WIDEST_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _bounded_format(text: str) -> Callable[..., str]:
    """Return the `format` of a text, with fields that are values of at most `WIDEST_FIELD`."""

    def write(*values: Any, **named: Any) -> str:
        for _, field, spec, _ in string.Formatter().parse(text):
            numbers = re.findall(r"\d+", spec or "")
            if re.search(r"[.\[]", field or "") or "{" in (spec or ""):
                raise ValueError(f"`{{{field}:{spec}}}` is not a plain field of `str.format`")
            if any(int(number) > WIDEST_FIELD for number in numbers):
                raise ValueError(f"`{spec}` is wider than {WIDEST_FIELD}")
        return text.format(*values, **named)

    return write


def _reason(error: BaseException) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__)


def template_digest(template: ChatTemplate | None) -> str:
    """Return the SHA-256 of a template and its special tokens; empty without a template."""
    if template is None:
        return ""
    return sha256(json.dumps([template.source, template.tokens]).encode()).hexdigest()


def keep_template(tokenizer: Path | str, run: Path) -> None:
    """Copy the template, special tokens and stop tokens into a run, unless it has the same.

    Other settings of the tokenizer in the run are kept. What an earlier run left is replaced.

    Raises:
        ArbError: a file is damaged, or cannot be written; or the run has a template, and there is
            none next to the tokenizer.
    """
    template, folder = find_template(tokenizer), run / COMPANIONS
    keep_special_tokens(tokenizer, run)
    settings: dict[str, Any] = {}
    try:
        kept_digest = template_digest(find_template(run / TOKENIZER))
        if (folder / SETTINGS).exists():
            settings = read_json(folder / SETTINGS, {})
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
        yield str(path), read_small(path, LARGEST, HINT).decode(errors="replace")
    old = folder / OLD_TEMPLATE
    held = read_json(old, {}).get("chat_template") if old.exists() else None
    for name, source in ((old, held), (folder / SETTINGS, settings.get("chat_template"))):
        if isinstance(source, list):  # several named templates
            named = {item.get("name"): item.get("template") for item in source if is_table(item)}
            source = named.get("default")
        if isinstance(source, str):
            yield str(name), source


def is_table(value: object) -> bool:
    """Return whether a JSON value is an object."""
    return isinstance(value, dict)

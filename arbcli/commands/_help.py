"""Commands: help pages with options in groups, and options that exclude or need one another."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from arbcli.base.errors import ArbError, quoted
from arbcli.config.settings import GROUPS

_RANGE = re.compile(r"(?:\s*\[|; )[^\[\];]*\bx[<>]=?[^\[\];]*(\]?)")
_DEFAULT = re.compile(r"\s\[[^\[\]]*\]$")
"""The default or range at the end of a help text."""
_TYPE = re.compile(r" (<.+>|[A-Z][A-Z ]*)$")
"""The type that Typer prints after an option, in its present and earlier formats."""
ALL = "arbcli.all_options"
"""Key of the context's `meta` that is set for the complete page."""
_UNBROKEN = "\u2011"
"""Stands for a hyphen while lines are broken, so that none ends within a name."""
TYPES = {"int": "N", "float": "X", "path": "PATH", "list": "PATH"}
"""Placeholders by the first letters of Typer's type; all other types are NAME."""


def summary(command: Callable) -> str:
    """Return the first line of a command's docstring without its example, for `arb --help`."""
    # no docstring is left with `PYTHONOPTIMIZE=2`
    return re.split(r": `|[;.\n]", inspect.getdoc(command) or "", maxsplit=1)[0] + "."


def show_all(context: typer.Context, is_set: bool | None) -> None:
    """Print the help page with all options and complete texts, and exit."""
    if is_set:
        context.meta[ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def combining(
    excluded: Mapping[str, Sequence[str]], needed: Mapping[str, str] | None = None
) -> Callable[[Callable], Callable]:
    """Return a decorator that declares which options of a command can be combined.

    Args:
        excluded: options that cannot be given with an option.
        needed: the option that one only applies with.
    """

    def declare(command: Any) -> Any:
        command.excluded, command.needed = excluded, needed or {}
        return command

    return declare


def options_given(context: Any) -> set[str]:
    """Return the options that a command line gives, also by `--set`; of a pair that was meant."""
    options = {
        (param.secondary_opts if context.params[param.name] is False else param.opts)[0]
        for param in context.command.params
        if context.get_parameter_source(param.name).name in ("COMMANDLINE", "ENVIRONMENT")
    }
    assigned = context.params.get("assignments") or ()
    return options | {f"--{text.partition('=')[0].strip().replace('_', '-')}" for text in assigned}


class Command(TyperCommand):
    """A command whose help page groups its options under headings.

    If the function of the command has `rare_options`, names of parameters, the page leaves them out
    and shows the first sentence of the others; `show_all` prints the complete page.
    """

    def invoke(self, ctx: Any) -> Any:
        """Check that the options can be combined, and run the command.

        Raises:
            ArbError: an option excludes or needs another one.
        """
        options = options_given(ctx)
        for option, others in getattr(self.callback, "excluded", {}).items():
            both = [other for other in others if other in options] if option in options else ()
            if both:
                raise ArbError(
                    f"{quoted(both)} cannot be combined with `{option}`",
                    f"leave {quoted(both)} out",
                )
        for option, other in getattr(self.callback, "needed", {}).items():
            if option in options and other not in options:
                raise ArbError(f"`{option}` only applies with `{other}`", f"add `{other}`")
        return super().invoke(ctx)

    def get_help(self, ctx: Any) -> str:
        """Return the page."""
        return super().get_help(ctx).replace(_UNBROKEN, "-")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the command's docstring."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(inspect.cleandoc(self.help or "").replace("-", _UNBROKEN))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, group by group."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS)}
        rare = () if ctx.meta.get(ALL) else getattr(self.callback, "rare_options", ())
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and param.name not in rare:
                if rare:
                    record = record[0], _first_sentence(record[1])
                title = getattr(param, "rich_help_panel", None)
                if title is None:
                    of_all = param.name in ("help", "help_all")
                    title = "Options" if of_all else getattr(self.callback, "heading", "Options")
                names, text = _readable_type(param, record[0]), _strip_range(record[1])
                groups[title].append((names, text.replace("-", _UNBROKEN)))
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    """Return the first sentence of a help text, and its default."""
    default = _DEFAULT.search(text)
    end = default.start() if default else len(text)
    sentence = re.split(r"(?<=\.)\s|;", text[:end].rstrip())[0].rstrip(".")
    return f"{sentence}.{text[end:]}"


def _strip_range(text: str) -> str:
    """Remove the range from `[default: 200; x>=1]` or `[x>=1]`, with one space before the rest."""
    text = _RANGE.sub(lambda match: match[1] if match[0][0] == ";" else "", text)
    return text.replace("  [", " [")


def _readable_type(param: Any, text: str) -> str:
    """Return `--steps N` for `--steps <int range>`."""
    if param.metavar is not None:
        return text.partition(" <")[0]

    def shorten(match: re.Match) -> str:
        if getattr(param, "multiple", False):
            return " PATH"
        kind = match[1].strip("<").lower()
        return " " + next((name for start, name in TYPES.items() if kind.startswith(start)), "NAME")

    return _TYPE.sub(shorten, text)

"""Pages of help: options in groups, with types that a person reads."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand

from arbcli.config.settings import GROUPS

_RANGE = re.compile(r"(?:\s*\[|; )[^\[\];]*\bx[<>]=?[^\[\];]*(\]?)")
_TYPE = re.compile(r" (<.+>|[A-Z][A-Z ]*)$")
"""The type that Typer writes after an option, in the words of present and earlier versions."""
TYPES = {"int": "N", "float": "X", "path": "PATH", "list": "PATH"}
"""Placeholders of values, by the type in the words of Typer; any other is NAME."""


def summary(command: Callable) -> str:
    """Find what a command does in a line of the list of commands: its first line, no example."""
    return re.split(r": `|[;.]", (inspect.getdoc(command) or "").splitlines()[0])[0] + "."


class Command(TyperCommand):
    """A command whose page of help has headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, a group at a time."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = getattr(param, "rich_help_panel", None) or "Options"
                row = (_with_readable_type(param, record[0]), _without_range(record[1]))
                groups[title].append(row)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _without_range(text: str) -> str:
    """Leave the range out of `[default: 200; x>=1]`, or of `[x>=1]`; one space is before either."""
    text = _RANGE.sub(lambda found: found[1] if found[0][0] == ";" else "", text)
    return text.replace("  [", " [")


def _with_readable_type(param: Any, text: str) -> str:
    """Write `--steps N` for `--steps <int range>`."""
    if param.metavar is not None:
        return text.partition(" <")[0]

    def shorten(found: re.Match) -> str:
        if getattr(param, "multiple", False):
            return " PATH"
        kind = found[1].strip("<").lower()
        return " " + next((name for start, name in TYPES.items() if kind.startswith(start)), "NAME")

    return _TYPE.sub(shorten, text)

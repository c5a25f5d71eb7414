"""Pages of help: options in groups, with types that a person reads."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand

from arbcli.commands._options import GRAPH_PARTS, HNET_PARTS, MODEL

PARTS = "Parts of arb-tiny and arb-3b"
GROUPS = {
    "Model": " ".join((*MODEL, "weights sub_norms")),
    "Parts of hnet presets": " ".join(HNET_PARTS),
    PARTS: " ".join(GRAPH_PARTS),
    "Text": "data val field tokenizer",
    "Optimisation": "steps minutes batch accum lr warmup schedule final_lr optimizer recompute"
    " compute init_from",
    "Run": "config_file print_config out resume save_every keep keep_best no_save eval_every"
    " log_every sample_every seed gpus wire device backend pin force dry_run",
    "Output": "plot log profile quiet as_json",
}
"""Names of parameters, by the heading of their group; any other stands before these."""
_GROUP_OF = {name: title for title, names in GROUPS.items() for name in names.split()}
NEEDED = {"Model": "preset", "Optimisation": "lr"}
"""Parameters that a command of such a group has: in others its names mean something else."""
_RANGE = re.compile(r"(?:\s*\[|; )[^\[\];]*\bx[<>]=?[^\[\];]*(\]?)")
_TYPE = re.compile(r" (<.+>|[A-Z][A-Z ]*)$")
"""What Typer writes behind an option, in its present words and in those of earlier versions."""
TYPES = {"int": "N", "float": "X", "path": "PATH", "list": "PATH"}
"""What stands for a value, by how Typer calls its type; a name for any other."""


def summary(command: Callable) -> str:
    """Find what a command does in a line of the list of commands: its first line, no example."""
    return re.split(r": `|[;.]", (inspect.getdoc(command) or "").splitlines()[0])[0] + "."


class Command(TyperCommand):
    """A command whose page of help has headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, a group at a time."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for title in GROUPS:
            groups[title] = []
        names = {param.name for param in self.get_params(ctx)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = _GROUP_OF.get(param.name, "Options")
                title = title if NEEDED.get(title, param.name) in names else "Options"
                row = (_with_readable_type(param, record[0]), _without_range(record[1]))
                groups[title].append(row)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _without_range(text: str) -> str:
    """Leave the range out of `[default: 200; x>=1]`, or of `[x>=1]`."""
    return _RANGE.sub(lambda found: found[1] if found[0][0] == ";" else "", text)


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

"""Tables as Markdown, with the source of their figures."""

from collections.abc import Iterable, Sequence
from textwrap import fill

from benchmarks.tables.rows import Runs

MIB = 2**20


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    first, *others = (
        "".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in [head, *rows]
    )
    return "".join([first, f"|{'---|' * len(head)}\n", *others])


def source(runs: Runs) -> str:
    """Return the origin of figures as a line: hardware, versions, commits and commands."""
    parts = []
    for fields, shown in (
        ("hardware", {"gpu": "", "driver": "driver ", "cuda": "CUDA ", "cpu": ""}),
        ("versions", {"python": "Python ", "torch": "torch ", "triton": "triton "}),
    ):
        for name, title in shown.items():
            values = {run[fields][name] for run in runs} - {None}
            parts += [f"{title}{value}" for value in sorted(values)]
    commits = [f"`{run['commit']}`{' with changes' * run['dirty']}" for run in runs]
    names = dict.fromkeys(commits)
    parts.append(f"commit{'s' * (len(names) > 1)} {', '.join(names)}")
    parts += dict.fromkeys(f"`{_program(run['command'])}`" for run in runs)
    return "\n" + fill(", ".join(parts) + ".", 100, break_on_hyphens=False) + "\n"


def _program(command: str) -> str:
    """Leave out which part of a benchmark was run."""
    return " ".join(command.split()[:3]) if command.startswith("python -m") else command


def number(value: float | None, form: str = ",") -> str:
    """Write a number in a format; nothing if it was not measured."""
    return "" if value is None else format(value, form)


def share(value: float | None) -> str:
    """Write a share as a percentage without decimals; nothing if it was not measured."""
    return "" if value is None else f"{value:.0%}".replace("%", " %")


def measured(head: Sequence[str], lines: Sequence[Sequence[str]], runs: Runs) -> str:
    """Write a table and the source of its figures, or that there are none."""
    return markdown(head, lines) + source(runs) if runs else "Not measured yet.\n"

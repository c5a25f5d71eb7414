"""`arb compare`: settings, losses, memory and time of several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from arbcli.base.output import bytes_text, clock, emit, table
from arbcli.base.run_files import require_run
from arbcli.commands._options import Json, find_run
from arbcli.commands._outputs import PICTURES, check_file
from arbcli.config.settings import OUTPUT

LONG_NAME = 12
"""Characters above which the name of a run is shortened in tables."""

if TYPE_CHECKING:
    from arbcli.inspect.runs import RunComparison, RunGroup, Spread


_RUNS = typer.Argument(metavar="RUN", help="Runs; auto is the run that was started last.")
_PLOT = typer.Option(
    help="Draw the losses of all runs to a .png, .pdf or .svg file.",
    metavar="FILE",
    rich_help_panel=OUTPUT,
)


def compare(
    runs: Annotated[list[Path], _RUNS],
    plot: Annotated[Path | None, _PLOT] = None,
    as_json: Json = False,
) -> None:
    """Compare settings, losses, memory and time of runs: `arb compare RUN RUN`.

    Runs that differ only in their seed are one row, with means and standard deviations.
    """
    if plot is not None:
        check_file(plot, "--plot", PICTURES)
    from arbcli.inspect.runs import compare_runs

    report = compare_runs([require_run(find_run(path)) for path in runs])
    if plot is not None:
        from arbcli.inspect.plots import plot_runs

        plot_runs(report, plot)
    emit(report, _tables(report), as_json=as_json)


def _tables(report: "RunComparison") -> Group:
    groups = report.groups
    paths = {run: Path(run).resolve().name for group in groups for run in group.runs}
    if len({*paths.values()}) < len(paths):  # runs of several folders
        paths = {run: run for run in paths}
    labels = short_names([*paths.values()])
    names = ["\n".join(labels[paths[run]] for run in group.runs) for group in groups]
    settings = [["", *report.settings]]
    for label, group in zip(names, groups, strict=True):
        settings.append([label, *(_value(group.settings[name]) for name in report.settings)])
    if len(report.settings) > len(groups):  # a row for each setting, as names are long
        settings = [list(column) for column in zip(*settings, strict=True)]
    losses = ["", "seed", "steps", "training", "held out", "lowest held out"]
    costs = ["", "state", "peak", "time", "bytes/s"]
    differing = table("Differences", settings[0], settings[1:])
    return Group(
        *([differing] if report.settings else []),
        table("Losses in nats per byte", losses, [*map(_losses, names, groups)]),
        table("Memory and time", costs, [*map(_costs, names, groups)]),
    )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the shortest beginning of each long name, up to a dash, that no other name has."""
    short = {name: name for name in names}
    for name in names:
        if len(name) <= LONG_NAME:
            continue
        words = name.split("-")
        starts = ("-".join(words[:number]) for number in range(1, len(words)))
        others = [f"{other}-" for other in names if other != name]
        unique = (s for s in starts if not any(other.startswith(f"{s}-") for other in others))
        short[name] = next(unique, name)
    return short


def _losses(names: str, group: "RunGroup") -> list[str]:
    return [
        names,
        ", ".join(map(str, group.seeds)),
        " to ".join(f"{step:,}" for step in dict.fromkeys(group.steps)),
        *map(_loss, (group.loss, group.val_loss, group.best_val_loss)),
    ]


def _costs(names: str, group: "RunGroup") -> list[str]:
    seconds, speed = group.seconds, group.bytes_per_second
    return [
        names,
        *(
            "none" if size is None else bytes_text(size)
            for size in (group.state_bytes, group.peak_bytes)
        ),
        "none" if seconds is None else clock(seconds.mean),
        "none" if speed is None else f"{speed.mean:,.0f}",
    ]


def _loss(loss: "Spread | None") -> str:
    if loss is None:
        return "none"
    return f"{loss.mean:.4f}" + ("" if loss.deviation is None else f" ± {loss.deviation:.4f}")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)

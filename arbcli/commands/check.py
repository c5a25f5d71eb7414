"""`arb check`: every file of a run verified, and what a resume would do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from arbcli.commands._options import Json, find_run
from arbcli.output import LiveLine, emit, table

if TYPE_CHECKING:
    from arbcli.train.check import CheckReport


def check(
    run: Annotated[
        Path, typer.Argument(metavar="auto|RUN|FILE", help="A run, or one of its checkpoints.")
    ],
    as_json: Json = False,
) -> None:
    """Verify every file of a run, and tell what a resume would do: `arb check RUN`.

    Nothing is changed. Exit 0 if all is well, 1 if something is damaged or cannot be used.
    """
    raise typer.Exit(show_check(run, as_json=as_json))


def show_check(run: Path, *, as_json: bool, root: Path | None = None) -> int:
    """Check a run, print the report, and return the exit code; `auto` is the last one in `root`."""
    with LiveLine() as line:
        line.show_wait("reading")
        from arbcli.train.check import check_run  # torch takes seconds to import

        report = check_run(find_run(run, root))
    emit(report, _shown(report), as_json=as_json)
    return 0 if report.passed else 1


def _shown(report: "CheckReport") -> Group:
    rows = [[finding.name, finding.state, finding.detail] for finding in report.findings]
    return Group(table(f"Files of {report.run}", ["", "", ""], rows, left=3), *_plan(report))


def _plan(report: "CheckReport") -> list[str]:
    if report.resumes_at is None:
        return [f"a resume   would not start: {report.stops}"]
    left = report.steps - report.resumes_at
    if left <= 0:
        return [f"a resume   has nothing to do: all {report.steps:,} steps are done"]
    lines = [f"a resume   goes on at step {report.resumes_at:,}, {left:,} steps to the end"]
    if report.drops_records:
        lines.append(f"           drops {report.drops_records:,} later records")
    for verb, names in (("sets aside", report.sets_aside), ("removes", report.removes)):
        if names:
            lines.append(f"           {verb} at its first save: {', '.join(names)}")
    return lines

"""`arb check`: verification of a run's files, and a preview of a resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group

from arbcli.base.errors import counted
from arbcli.base.output import LiveLine, emit, table
from arbcli.base.run_files import require_run
from arbcli.commands._options import Checkpoint, Json, Run, find_run, one_path

if TYPE_CHECKING:
    from arbcli.training.check import CheckReport


def check(run: Run = None, checkpoint: Checkpoint = None, as_json: Json = False) -> None:
    """Verify all files of a run and preview a resume: `arb check RUN`.

    Changes nothing. Exit 0 if all files are valid, 1 if one is damaged or cannot be used.
    """
    raise typer.Exit(print_check(one_path(run, checkpoint), as_json=as_json))


def print_check(
    run: Path,
    changes: Mapping[str, Any] = {},
    *,
    as_json: bool,
    root: Path | None = None,
) -> int:
    """Check a run, print the report, and return the exit code.

    Args:
        run: a run directory, a checkpoint in one, or `auto`.
        changes: further arguments of `check_run`.
        as_json: whether to print JSON.
        root: directory of the runs, for `auto`.
    """
    run = find_run(run, root)
    require_run(run)  # refuses another path before torch is imported
    with LiveLine("reading"):
        from arbcli.training.check import check_run  # torch takes seconds to import

        report = check_run(run, **changes)
    emit(report, _tables(report), as_json=as_json)
    return 0 if report.passed else 1


def _tables(report: "CheckReport") -> Group:
    rows = [[finding.name, finding.state, finding.detail] for finding in report.findings]
    return Group(table(f"Files of {report.run}", ["", "", ""], rows, left=3), *_resume_plan(report))


def _resume_plan(report: "CheckReport") -> list[str]:
    if report.resumes_at is None or report.steps is None:
        return [f"a resume   would not start: {report.stops}"]
    left = report.steps - report.resumes_at
    if left <= 0 and not report.evaluates_first:
        return [f"a resume   has nothing to do: all {report.steps:,} steps are done"]
    if report.has_ended and not report.evaluates_first:
        return ["a resume   has nothing to do: the run has ended by `--patience`"]
    steps = counted(left, "step")
    lines = [f"a resume   goes on at step {report.resumes_at:,}, {steps} to the end"]
    if report.steps_before is not None:
        lines.append(
            f"           has {report.steps:,} steps then, and their schedule, instead of"
            f" {report.steps_before:,}"
        )
    if report.evaluates_first:
        lines.append(f"           evaluates step {report.resumes_at:,} first: it has no record")
    if report.drops_records:
        lines.append(f"           replaces {counted(report.drops_records, 'record')}")
    first = "at its first save"
    aside = f"sets aside {first if report.steps_before is None else 'at once'}"
    for action, names in ((aside, report.sets_aside), ("removes", report.removes)):
        if names:
            lines.append(f"           {action}: {', '.join(names)}")
    return lines

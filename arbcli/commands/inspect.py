"""`arb inspect`: contents of a saved model, and differences between two."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from arbcli.base.output import bytes_text, emit, note, table
from arbcli.commands._options import NAMED, Checkpoint, Json, check_is_model, find_run, one_path
from arbcli.commands._parts_table import parts_table

if TYPE_CHECKING:
    from arbcli.inspect.saved import DifferenceReport, SavedReport

SHOWN = 30
"""Maximum number of tensors in the table of differences; JSON has all."""


_FILE = typer.Argument(
    metavar=NAMED, help="A run, a checkpoint, or an export; auto is the run that was started last."
)
_DIFF = typer.Option(metavar=NAMED, help="Compare with another file.")


def inspect(
    file: Annotated[Path | None, _FILE] = None,
    checkpoint: Checkpoint = None,
    diff: Annotated[Path | None, _DIFF] = None,
    as_json: Json = False,
) -> None:
    """Show the contents of a saved model: `arb inspect RUN`. Verifies its digests, if any."""
    file, other = find_run(one_path(file, checkpoint)), diff and find_run(diff)
    for path in filter(None, (file, other)):
        check_is_model(path)
    from arbcli.inspect import saved  # torch takes seconds to import, so not for `arb --help`

    first = saved.open_saved(file, note)
    if other is None:
        report = first.report()
        emit(report, _tables(report), as_json=as_json)
        return
    differences = saved.compare(first, saved.open_saved(other, note))
    emit(differences, _differences(differences), as_json=as_json)


def _tables(report: "SavedReport") -> RenderableType:
    from arbcli.inspect.runs import flat_items  # not needed for `arb --help`

    about = {
        "kind": report.kind,
        "step": report.step,
        "digests": report.digests,
        "digest": report.digest,
        "export of": report.origin,
        "weights": f"{report.num_weights:,}",
        "bytes": bytes_text(report.bytes),
        **{f"model.{name}": value for name, value in _model_fields(report)},
        **{f"run.{name}": value for name, value in report.settings.items()},
        **{
            name: ", ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in flat_items(report.run)
        },
    }
    rows = [[name, str(value)] for name, value in about.items() if value is not None]
    parts = [
        [area, kind, bytes_text(size)]
        for area, kinds in report.bytes_by_area.items()
        for kind, size in kinds.items()
    ]
    signs = [
        [area, *(f"{share:.1%}" for share in shares), _octaves(report.octaves[area])]
        for area, shares in report.trits.items()
    ]
    return Group(
        table(report.path, ["", ""], rows, left=2),
        *([parts_table(report.parts)] if report.parts else []),
        table("Bytes", ["area", "of", ""], parts, left=2),
        table("Weights", ["area", "below 0", "0", "above 0", "octave: how many"], signs),
    )


def _model_fields(report: "SavedReport") -> Iterator[tuple[str, Any]]:
    """Yield the fields of the model's configuration that are not shown in the table of parts."""
    for name, value in report.config.items():
        if not report.parts or not isinstance(value, dict | list):
            yield name, value


def _octaves(counts: dict[int, int]) -> str:
    total = sum(counts.values())
    shown = {octave: count / total for octave, count in counts.items() if count / total >= 0.001}
    return ", ".join(f"{octave}: {share:.1%}" for octave, share in shown.items())


def _differences(report: "DifferenceReport") -> RenderableType:
    rows = [[f"model.{name}", f"{a} and {b}", "", ""] for name, (a, b) in report.config.items()]
    rows += [[f"run.{name}", f"{a} and {b}", "", ""] for name, (a, b) in report.settings.items()]
    rows += [[name, where, "", ""] for name, where in report.missing.items()]
    for tensor in report.tensors[:SHOWN]:
        share = f"{tensor.different:,} of {tensor.elements:,}"
        relative = "" if tensor.relative is None else f"{tensor.relative:.2%}"
        rows.append(
            [
                tensor.name,
                share,
                "not finite" if tensor.largest is None else f"{tensor.largest:.3g}",
                relative,
            ]
        )
    if len(report.tensors) > SHOWN:
        rows.append([f"and {len(report.tensors) - SHOWN} more", "", "", ""])
    rows.append([f"{report.num_equal} tensors", "equal", "", ""])
    columns = [report.compared, "different", "largest", "root-mean-square"]
    return table(f"{report.first} and {report.second}", columns, rows)

"""`arb export`: conversion of a trained model to formats of other programs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from arbcli.base.output import bytes_text, emit, note, table
from arbcli.commands._options import Checkpoint, Json, Run, find_run, one_of, one_path
from arbcli.commands._outputs import check_folder
from arbcli.interop.formats import FORMATS, TYPES, output_path

if TYPE_CHECKING:
    from arbcli.interop.exporting import ExportReport


_TO = typer.Option(
    metavar="|".join(FORMATS),
    help="; ".join(f"{name}: {text}" for name, text in FORMATS.items()) + ".",
    callback=one_of("to", FORMATS),
)
_TYPE = typer.Option(
    "--type",
    metavar="TYPE",
    help=f"Type of the weights: {', '.join(TYPES)}; bf16 or f32 for hf. [default: the"
    " smallest lossless one; bf16 for hf, or packed]",
    callback=one_of("type", TYPES),
)
_OUT = typer.Option(
    help="File or folder to write. [default: one in this folder, named for the run]"
)


def export(
    to: Annotated[str, _TO],
    run: Run = None,
    checkpoint: Checkpoint = None,
    type: Annotated[str | None, _TYPE] = None,
    out: Annotated[Path | None, _OUT] = None,
    as_json: Json = False,
) -> None:
    """Convert a trained model to another format: `arb export RUN --to gguf`.

    A type that cannot represent the weights exactly is refused.
    """
    if out is not None:
        check_folder(out.parent, "--out")
    run = find_run(one_path(run, checkpoint), loads=True)
    output_path(run, to, out)
    from arbcli.interop import exporting

    report = exporting.export(run, to, out=out, kind=type, note=note)
    emit(report, _table(report), as_json=as_json)


def _table(report: "ExportReport") -> Table:
    shown = asdict(report) | {
        "bytes": bytes_text(report.bytes),
        "num_weights": f"{report.num_weights:,}",
        "seconds": f"{report.seconds:.1f}",
    }
    rows = [[name.replace("num_", ""), str(value)] for name, value in shown.items()]
    return table(f"Exported to {report.format}", ["", ""], rows)

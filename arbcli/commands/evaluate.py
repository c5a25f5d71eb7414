"""`arb evaluate`: loss of a saved model over a whole text."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from arbcli.base.output import PIPE_SECONDS, LiveLine, emit, note, table
from arbcli.base.run_files import run_of
from arbcli.commands import _options as opt
from arbcli.commands._help import combining
from arbcli.data.files import has_documents
from arbcli.data.opening import open_text
from arbcli.generation import option_checks

if TYPE_CHECKING:
    from arbcli.generation.evaluation import EvaluateReport, KindLoss


_DATA = typer.Option(
    help="File, folder or glob, - for stdin, or hf:NAME:SPLIT; several are concatenated."
    " [default: the run's held-out text]"
)
_STRIDE = typer.Option(
    min=1,
    help="Bytes between windows. [default: half the model's context, or all of a masked model's]",
)
_BATCH = typer.Option(
    min=1, help="Windows per forward pass. [default: 16, of at most 32,768 positions]"
)
_DRAWS = typer.Option(
    min=1, max=4096, help="Masked models only: random masks drawn for each window. [default: 16]"
)


@combining({}, {"--field": "--data"})
def evaluate(
    run: opt.Run = None,
    checkpoint: opt.Checkpoint = None,
    data: Annotated[list[str] | None, _DATA] = None,
    field: opt.Field = None,
    data_format: opt.DataFormat = None,
    stride: Annotated[int | None, _STRIDE] = None,
    batch: Annotated[int | None, _BATCH] = None,
    draws: Annotated[int | None, _DRAWS] = None,
    compute: opt.ComputeOfRun = None,
    kv: opt.CacheDtype = None,
    device: opt.Device = None,
    backend: opt.Backend = None,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Measure bits per byte over a whole text: `arb evaluate RUN --data book.txt`.

    Each byte after the first is predicted once, from at least context - stride bytes before it. Of
    chats, only answers are predicted.
    """
    option_checks.check_document_options(field, stride)
    checkpoint = opt.find_run(opt.one_path(run, checkpoint), loads=True)
    opt.check_entries(data or (), field, data_format)
    if config := opt.config_in_header(checkpoint):
        option_checks.check_masked_option(config, "--draws", draws)
        option_checks.check_stride(config, stride)
    with LiveLine("loading") as line:
        from arbcli.generation import (
            evaluation,  # imports torch: slow, and not needed for `arb --help`
        )
        from arbcli.training.directory import held_out_text, run_conversion

        if data:
            text = open_text(data, run_conversion(checkpoint, field, data_format))
        else:
            text = held_out_text(run_of(checkpoint))
        model, name, _, backend = opt.open_model(checkpoint, device, backend, compute)
        if field is not None and has_documents(field):
            documents = evaluation.documents_for(model, Path(name), text[0], field)
            if documents.cut:
                note(f"{documents.cut:,} documents are cut to {documents.context:,} tokens")
            text = documents, f"{text[1]}, `{field}`"
        report = evaluation.evaluate(
            model,
            name,
            *text,
            stride=stride,
            batch=batch,
            backend=backend,
            kv=kv,
            draws=draws,
            progress=(lambda *_: None) if quiet else _Progress(line),
        )
    emit(report, _table(report), as_json=as_json)


class _Progress:
    """Shows progress: each per cent on a terminal, else each tenth, or every `PIPE_SECONDS`."""

    def __init__(self, line: LiveLine) -> None:
        self.line, self.shown, self.last = line, 0, time.perf_counter()

    def __call__(self, done: int, size: int, loss: float) -> None:
        percent, now = 100 * done // size, time.perf_counter()
        least = 1 if self.line.is_live or now - self.last >= PIPE_SECONDS else 10
        if percent // least > self.shown // least:
            self.shown, self.last = percent, now
            self.line.show(f"{percent:3} %  {done:,} bytes  {loss / math.log(2):.4f} bits a byte")


def _table(report: "EvaluateReport") -> Table:
    rows = [
        ["checkpoint", report.checkpoint],
        ["text", report.text],
        ["nats a byte" + (", at most" if report.draws else ""), f"{report.nats_per_byte:.4f}"],
        ["bits a byte", f"{report.bits_per_byte:.4f}"],
        *_token_rows(report),
        ["bytes", f"{report.bytes:,}"],
        ["order-0 entropy, nats", f"{report.entropy:.4f}"],
        ["compression ratio", f"{report.compression_ratio:.3f}"],
        ["context, stride", f"{report.context:,}, {report.stride:,}"],
        *(
            []
            if report.draws is None
            else [["draws of hidden bytes a window", f"{report.draws:,}"]]
        ),
        ["keys and values", report.kv],
        ["bytes/s", f"{report.bytes_per_second:,.0f}"],
    ]
    if len(report.by_position) > 1:
        for part in report.by_position:
            rows.append(
                [f"at positions {part.first:,} to {part.last:,}", f"{part.nats_per_byte:.4f}"]
            )
    for kind in report.by_kind:
        rows += _kind_rows(kind)
    return table(f"Loss of a whole text: {report.device}, backend {report.backend}", ["", ""], rows)


def _kind_rows(kind: "KindLoss") -> list[list[str]]:
    rows = [[f"{kind.kind}: nats a byte, bytes", f"{kind.nats_per_byte:.4f}, {kind.bytes:,}"]]
    if kind.bits_per_unit is not None:
        sizes = {"this model": kind.bits_per_unit, **(kind.peer_bits_per_unit or {})}
        shown = ", ".join(f"{name} {bits:.3f}" for name, bits in sizes.items())
        if kind.peer_bits_per_unit is None:
            shown += "; `pip install 'arb[media]'` for others"
        rows.append([f"{kind.kind}: bits a {kind.unit}", shown])
    return rows


def _token_rows(report: "EvaluateReport") -> list[list[str]]:
    if report.tokens is None:
        return []
    return [["nats a token", f"{report.nats_per_token:.4f}"], ["tokens", f"{report.tokens:,}"]]

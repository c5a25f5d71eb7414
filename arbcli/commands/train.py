"""`arb train`: train a model, or continue a run."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbcli.commands._options import (
    Backend,
    Compute,
    Ctx,
    Data,
    Device,
    Dim,
    Direction,
    Ffn,
    Heads,
    Json,
    Layers,
    Preset,
    Recompute,
    Rule,
    Seed,
    TScaleType,
    Val,
    option_of,
    takes_parts,
)
from arbcli.errors import ArbError
from arbcli.output import LiveLine, bytes_text, emit_json, note
from arbcli.signals import exit_code

if TYPE_CHECKING:
    from arbcli.train.record import Record, TrainReport
    from arbcli.train.trainer import Trainer


@takes_parts
def train(
    preset: Preset = None,
    ctx: Ctx = None,
    data: Data = None,
    val: Val = None,
    steps: Annotated[int | None, typer.Option(min=1, help="[default: 400]")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Train as many steps as fit, not --steps.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows a batch. [default: 16]")] = None,
    accum: Annotated[int | None, typer.Option(min=1, help="Batches a step. [default: 1]")] = None,
    lr: Annotated[float | None, typer.Option(help="[default: the rule's; 0.1 for arb-3b]")] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Steps, at most half of them. [default: 100]"),
    ] = None,
    rule: Rule = None,
    direction: Direction = None,
    tscale_type: TScaleType = None,
    weights: Annotated[
        str | None, typer.Option(help="ternary, or a twin: float or ste. [default: ternary]")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Of a twin: adamw or muon. [default: adamw]")
    ] = None,
    sub_norms: Annotated[
        bool | None, typer.Option(help="Norms before the output projections. [default: yes]")
    ] = None,
    dim: Dim = None,
    layers: Layers = None,
    heads: Heads = None,
    ffn: Ffn = None,
    out: Annotated[Path | None, typer.Option(help="[default: the next free one in runs/]")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|PATH", help="Go on with the last run, or the one named."),
    ] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps. [default: 500]")] = None,
    eval_every: Annotated[int | None, typer.Option(min=1, help="Steps. [default: 500]")] = None,
    compute: Compute = None,
    recompute: Recompute = None,
    device: Device = None,
    backend: Backend = None,
    seed: Seed = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses to this PNG.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Json = False,
    *,
    parts: dict[str, Any],
) -> None:
    """Train a model on bytes, or continue a run: `arb train --ctx 64`."""
    given = {name: value for name, value in locals().items() if value is not None}
    given |= given.pop("parts")
    from arbcli.inspect import plots  # torch takes seconds to import, so not for `arb --help`
    from arbcli.train.configure import new_config
    from arbcli.train.directory import RUNS, latest_run, new_run_path
    from arbcli.train.run import resume_run, start_run

    if plot is not None:
        plots.require_matplotlib()
    place = {name: given.pop(name, None) for name in ("device", "backend")}
    for name in ("out", "resume", "minutes", "plot", "quiet", "as_json"):
        given.pop(name, None)
    with _Display(quiet=quiet, as_json=as_json) as display:
        if resume is not None:
            _refuse_changes(given, minutes)
            path = latest_run(out or RUNS) if resume == "auto" else Path(resume)
            report = resume_run(path, display, **place)
        else:
            config = new_config(**given, **place)
            report = start_run(config, out or new_run_path(config), display, minutes=minutes)
    if plot is not None:
        plots.plot_training(Path(report.run), plot)
    display.finished(report)
    if report.stopped_by is not None:
        raise typer.Exit(exit_code(report.stopped_by))


def _refuse_changes(given: dict[str, Any], minutes: float | None) -> None:
    changed = [*given, *(["minutes"] if minutes is not None else [])]
    if changed:
        options = ", ".join(f"`{option_of(name)}`" for name in changed)
        raise ArbError(
            f"a run goes on with its own settings, so {options} cannot be given to it",
            hint="leave them out, or start a new run without `--resume`",
        )


class _Display:
    """Shows a run: a live line and tables for a person, or a JSON object a record."""

    def __init__(self, *, quiet: bool, as_json: bool) -> None:
        self.quiet, self.as_json = quiet, as_json
        self.line = LiveLine()

    def __enter__(self) -> "_Display":
        self.line.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.line.__exit__(*exception)

    def started(self, run: Path, trainer: "Trainer", facts: dict[str, Any]) -> None:
        if self.quiet:
            return
        config, text = trainer.config, facts["text"]
        self.steps = config.steps
        model = config.model
        kind = f"{model.rule}" if model.weights == "ternary" else model.weights
        number = trainer.num_weights
        note(f"run     {run}")
        note(f"text    {text['description']}: {text['train_bytes']:,} bytes to train on,")
        note(f"        {text['val_bytes']:,} held out, order-0 entropy {text['entropy']:.3f} nats")
        note(f"model   {number:,} {kind} weights, {model.scale_type}, ctx {model.ctx}")
        note(f"device  {config.device}, backend {config.backend}, {config.compute}")
        if trainer.step:
            note(f"resumed at step {trainer.step}")

    def recorded(self, record: "Record") -> None:
        if self.as_json:
            emit_json(dataclasses.asdict(record))
        if self.quiet:
            return
        line = (
            f"step {record.step}/{self.steps}  loss {record.loss:.3f} nats"
            f"  {record.bits_per_byte:.3f} bits  {record.bytes_per_second:,.0f} bytes/s"
            f"  {_clock(record.seconds_left)} left"
            f"  {bytes_text(record.state_bytes)} state, {bytes_text(record.peak_bytes)} peak"
        )
        if record.flip_share is not None:
            line += f"  {record.flip_share:.2%} flipped"
        if record.val_loss is not None:
            line += f"  held-out {record.val_loss:.4f}"
        self.line.show(line, keep=record.val_loss is not None)
        if record.val_loss is not None and record.gauges:
            self.line.show(_gauges(record.gauges), keep=True)

    def noted(self, message: str) -> None:
        note(message)

    def finished(self, report: "TrainReport") -> None:
        """Show how the run ended."""
        if report.stopped_by:
            note(f"stopped by {report.stopped_by} after step {report.steps}")
            if report.checkpoint:
                note(f"continue with: arb train --resume {report.run}")
            return
        if not self.quiet:
            note(f"\nsample\n{report.sample}\n")
            bits = report.bits_per_byte
            note(f"held-out loss  {report.val_loss:.4f} nats = {bits:.4f} bits a byte")
            note(f"               {report.entropy:.4f} nats is the text's order-0 entropy,")
            note(f"               {math.log(256):.4f} nats is uniform, ln 256")
            note(f"time           {_clock(report.seconds)}")
        note(f"checkpoint     {report.checkpoint or 'none: a float twin is measured, not kept'}")


def _gauges(gauges: dict[str, float]) -> str:
    """Show what a model measures of itself: shares, and the load of its fullest expert."""
    shown = {
        "alive_codes": "{:.1%} of codes alive",
        "alive_knowledge": "{:.1%} of knowledge alive",
        "fullest_expert": "fullest expert {:.1f} times the mean",
        "edges": "{:.1%} of edges taken",
    }
    return "  " + ", ".join(shown.get(name, name + " {}").format(v) for name, v in gauges.items())


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

"""`arb probe-loss`: a few training steps under the microscope."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from arbcli.commands._options import (
    Backend,
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
    Rule,
    Seed,
    TScaleType,
    Val,
)
from arbcli.errors import ArbError
from arbcli.output import bytes_text, emit, note, table

if TYPE_CHECKING:
    from arbcli.probe import ProbeReport, TensorReport

OF_A_STEP = ("data", "val", "batch", "lr", "seed", "device", "backend")
"""Options that a saved model takes too; the others are what it is."""


def probe_loss(
    preset: Preset = None,
    ctx: Ctx = None,
    tscale_type: TScaleType = None,
    rule: Rule = None,
    direction: Direction = None,
    data: Data = None,
    val: Val = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to do.")] = 12,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows a batch. [default: 16]")] = None,
    lr: Annotated[float | None, typer.Option(help="[default: the rule's]")] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps, at most half of them. [default: half]")
    ] = None,
    dim: Dim = None,
    layers: Layers = None,
    heads: Heads = None,
    ffn: Ffn = None,
    backend: Backend = None,
    device: Device = None,
    seed: Seed = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="RUN|FILE", help="Probe a saved model, left as it is.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw stream, flips and loss to a PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Do a few steps, measure everything, name what is wrong: `arb probe-loss --rule votes`.

    A new model does a whole training of `--steps` steps in miniature. Exit 0 if the verdict is ok,
    1 if it is not.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from arbcli.plots import plot_probe, require_matplotlib

    if plot is not None:
        require_matplotlib()
    for name in ("steps", "checkpoint", "plot", "as_json"):
        given.pop(name, None)
    report = _probe(given, steps, checkpoint)
    if plot is not None:
        plot_probe(dataclasses.asdict(report), plot)
    emit(report, _shown(report), as_json=as_json)
    raise typer.Exit(0 if report.passed else 1)


def _probe(given: dict[str, Any], steps: int, checkpoint: Path | None) -> "ProbeReport":
    from arbcli import probe, runs  # torch takes seconds to import, so not for `arb --help`

    if checkpoint is None:
        return probe.probe(runs.new_config(steps=steps, **given), steps=steps)
    _refuse(given, OF_A_STEP)
    config, saved = probe.open_saved(checkpoint, steps=steps, note=note, **given)
    return probe.probe(config, steps=steps, checkpoint=saved)


def _refuse(given: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [f"`--{name.replace('_', '-')}`" for name in given if name not in known]
    if unknown:
        raise ArbError(
            f"a saved model keeps its own settings, so {', '.join(unknown)} cannot be given to it",
            hint="leave them out, or probe a new model without `--checkpoint`",
        )


def _shown(report: "ProbeReport") -> Group:
    config, model, last = report.config, report.config["model"], report.readings[-1]
    starts = [*report.position_starts, model["ctx"]]
    buckets = zip(pairwise(starts), last.loss_by_position, strict=True)
    by_position = "  ".join(f"{a}-{b - 1}: {_number(loss, 2)}" for (a, b), loss in buckets)
    return Group(
        f"{model['rule']}, {report.num_weights:,} weights, {model['scale_type']},"
        f" {config['device']}, backend {config['backend']}, {config['compute']}; {report.text}",
        _steps(report),
        _layers(report),
        _tensors(report),
        f"held-out loss     {_number(last.val_loss, 4)} nats; uniform {report.uniform_loss:.4f},"
        f" order-0 entropy {report.text_entropy:.4f}",
        f"by position       {by_position}",
        f"first NaN or Inf  {report.first_nonfinite or 'none'}",
        f"causality         {report.acausal_logits} predictions moved by a later byte",
        f"memory            {bytes_text(report.state_bytes)} state,"
        f" {bytes_text(report.peak_bytes)} peak",
        *(f"verdict           {verdict.name}: {verdict.evidence}" for verdict in report.verdicts),
    )


def _steps(report: "ProbeReport") -> Any:
    columns = ["step", "lr", "loss", "held out", "flipped %", "growth", "logits", "entropy", "MiB"]
    rows = [
        [
            str(reading.step),
            _number(reading.lr, 3),
            _number(reading.loss, 3),
            _number(reading.val_loss, 3),
            _percent(reading.flip_share),
            _number(reading.residual_growth, 2),
            f"{_number(reading.logit_min, 1)} to {_number(reading.logit_max, 1)}",
            _number(reading.prediction_entropy, 2),
            f"{reading.live_bytes / 2**20:,.2f}",
        ]
        for reading in report.readings
    ]
    return table("Steps: losses in nats a byte, live tensors in MiB", columns, rows)


def _layers(report: "ProbeReport") -> Any:
    first, last = report.readings[0], report.readings[-1]
    branches = zip(("", *last.attention_rms), ("", *last.mlp_rms), strict=True)
    rows = []
    for index, (before, after, branch) in enumerate(
        zip(first.residual_rms, last.residual_rms, branches, strict=True)
    ):
        name = f"block {index - 1}" if index else "embedding"
        takes_off = last.takeoff_layer is not None and index - 1 == last.takeoff_layer
        sizes = [value if value == "" else _number(value, 3) for value in branch]
        mark = "takes off" if takes_off else ""
        rows.append([name, _number(before, 3), _number(after, 3), *sizes, mark])
    columns = ["after", "stream at first", "stream at last", "attention", "MLP", ""]
    return table("Residual stream: root-mean-square", columns, rows)


def _tensors(report: "ProbeReport") -> Any:
    columns = ["tensor", "up %", "down %", "into 0 %", "out of 0 %", "still %", "update size"]
    columns += ["scale v", "saturated %"]
    rows = [_tensor_row(tensor) for tensor in report.tensors]
    return table("Trits: flips of a step on average", columns, rows)


def _tensor_row(tensor: "TensorReport") -> list[str]:
    scale = tensor.digits["scale"]
    shares = [tensor.up_share, tensor.down_share, tensor.into_zero_share, tensor.out_of_zero_share]
    return [
        tensor.name.removesuffix(".weight"),
        *map(_percent, shares),
        _percent(tensor.still_share),
        _number(tensor.update_size, 2),
        f"{scale.low} to {scale.high}",
        " / ".join(_percent(digit.saturated_share) for digit in tensor.digits.values()),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"

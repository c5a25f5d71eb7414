"""`arb probe-loss`: a few training steps under the microscope."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from arbcli.commands._options import (
    NAMED,
    NAMES_RUN,
    Backend,
    Checkpoint,
    Device,
    HalfWarmup,
    Json,
    check_settings,
    find_run,
    given_options,
    option_of,
    takes_settings,
    the_one,
    with_model_file,
)
from arbcli.commands._outputs import PICTURES, check_file
from arbcli.errors import ArbError
from arbcli.output import LiveLine, bytes_text, chunked_text, emit, note, table

if TYPE_CHECKING:
    from arbcli.inspect.probe import ChunkReport, ProbeReport, TensorReport

STEPS = 12
"""Enough for the warm-up to reach full speed, and for votes to gather, flip and gather again."""
OF_A_STEP = ("data", "val", "field", "batch", "lr", "seed", "compute")
"""Fields that can be given with a saved model; the others are its own."""


@takes_settings("data", "val", "field", "tokenizer", "batch", "lr", "seed", "compute")
def probe_loss(
    run: Annotated[
        Path | None,
        typer.Argument(metavar=NAMED, help=f"Probe a saved model, left as it is: {NAMES_RUN}"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to do.")] = STEPS,
    warmup: HalfWarmup = None,
    backend: Backend = None,
    device: Device = None,
    checkpoint: Checkpoint = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw stream, flips, loss, logits: .png, .pdf or .svg.")
    ] = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Do a few steps, measure everything, name what is wrong: `arb probe-loss --rule votes`.

    A new model does a whole training of `--steps` steps in miniature. Exit 0 if the verdict is ok,
    1 if it is not.
    """
    if plot is not None:
        check_file(plot, "--plot", PICTURES)
    given = given_options(**given, warmup=warmup)
    named = None if run is None and checkpoint is None else the_one(run, checkpoint)
    if named is None:
        given = with_model_file(given)
        check_settings(given | {"steps": steps})
    else:
        _refuse_changes(given)
        if "field" in given and "data" not in given:
            raise ArbError(
                "`--field` only applies with `--data`", hint="give `--data`, or leave `--field` out"
            )
        named = find_run(named, loads=True)
    with LiveLine() as line:
        line.show_wait("loading")
        from arbcli.inspect.plots import plot_probe, require_matplotlib

        if plot is not None:
            require_matplotlib()
        report = _probe(given, steps, named, device, backend, line.show_wait)
    emit(report, _shown(report), as_json=as_json)
    if plot is not None:
        plot_probe(dataclasses.asdict(report), plot)
    raise typer.Exit(0 if report.passed else 1)


def _probe(
    given: dict[str, Any],
    steps: int,
    checkpoint: Path | None,
    device: str | None,
    backend: str | None,
    progress: Callable[[str], None],
) -> "ProbeReport":
    from arbcli.inspect import probe, room  # torch takes seconds to import, so not for `arb --help`
    from arbcli.train.configure import new_config

    if checkpoint is None:
        config = new_config(steps=steps, device=device, backend=backend, **given)
        room.check_memory(config)
        return probe.probe(config, steps=steps, progress=progress)
    config, saved = probe.open_saved(
        checkpoint, steps=steps, note=note, device=device, backend=backend, **given
    )
    return probe.probe(config, steps=steps, checkpoint=saved, progress=progress)


def _refuse_changes(given: dict[str, Any]) -> None:
    changed = [f"`{option_of(name)}`" for name in given if name not in OF_A_STEP]
    if changed:
        raise ArbError(
            f"{', '.join(changed)} cannot be changed for a saved model",
            hint="leave them out, or probe a new model",
        )


def _shown(report: "ProbeReport") -> Group:
    config, model, last = report.config, report.config["model"], report.readings[-1]
    starts = [*report.position_starts, model["ctx"]]
    buckets = zip(pairwise(starts), last.loss_by_position, strict=True)
    by_position = "  ".join(f"{a}-{b - 1}: {_number(loss, 2)}" for (a, b), loss in buckets)
    growths = zip(pairwise(starts), last.growth_by_position, strict=False)
    growth = "  ".join(f"{a}-{b - 1}: {_number(value, 2)}" for (a, b), value in growths)
    scales = [tensor.digits["scale"] for tensor in report.tensors]
    lowest, highest = min(scale.low for scale in scales), max(scale.high for scale in scales)
    return Group(
        f"{model['rule']}, {report.num_weights:,} weights, {model['scale_type']},"
        f" {config['device']}, backend {config['backend']}, {config['compute']}; {report.text}",
        _steps(report),
        _layers(report),
        *_streams(report),
        _tensors(report),
        f"held-out loss     {_number(last.val_loss, 4)} nats; uniform {report.uniform_loss:.4f},"
        f" order-0 entropy {report.text_entropy:.4f}",
        f"by position       {by_position}",
        *([f"growth            {growth}"] if growth else []),
        f"scales            v from {lowest} to {highest}, in 1/128 octaves",
        f"first NaN or Inf  {report.first_nonfinite or 'none'}",
        f"causality         {report.acausal_logits} predictions moved by a later byte"
        + _of_layers(report.acausal_layers),
        *(_chunks(report.chunks) if report.chunks else ()),
        f"memory            {bytes_text(report.state_bytes)} state,"
        f" {bytes_text(last.live_bytes)} live, {bytes_text(report.peak_bytes)} peak",
        *(f"verdict           {verdict.name}: {verdict.evidence}" for verdict in report.verdicts),
    )


def _of_layers(moved: tuple[int, ...]) -> str:
    return f", and {sum(moved)} positions of {len(moved)} layers" if moved else ""


def _chunks(chunks: "ChunkReport") -> Iterator[str | Text]:
    lengths = ", then ".join(f"{length:.2f}" for length in chunks.mean_lengths)
    yield f"chunks            {lengths} bytes on average; in the held-out text:"
    yield chunked_text(bytes(chunks.sample_bytes), chunks.sample_depths)


def _steps(report: "ProbeReport") -> Table:
    rows = [
        [
            str(reading.step),
            _number(reading.lr, 3),
            _number(reading.loss, 3),
            _number(reading.val_loss, 3),
            _percent(reading.flip_share),
            _number(reading.residual_growth, 2),
            f"{_number(reading.logit_min, 1)} to {_number(reading.logit_max, 1)}",
            _number(reading.logit_spread, 2),
            _number(reading.prediction_entropy, 2),
        ]
        for reading in report.readings
    ]
    columns = ["step", "lr", "loss", "held out", "flip %", "growth", "logits", "spread"]
    columns += ["entropy"]
    return table("Steps: losses and entropy in nats, growth of the residual stream", columns, rows)


def _layers(report: "ProbeReport") -> Table:
    first, last = report.readings[0], report.readings[-1]
    names = ["embedding", *(f"block {index}" for index in range(len(last.channel_rms)))]
    branches = zip((None, *last.mixer_rms), (None, *last.channel_rms), strict=True)
    figures = zip(first.residual_rms, last.residual_rms, last.residual_most, branches, strict=True)
    rows = [
        [name, *(_number(size, 3) for size in (before, after, most, *branch))]
        for name, (before, after, most, branch) in zip(names, figures, strict=True)
    ]
    if last.takeoff_layer is not None:
        rows[last.takeoff_layer + 1][0] += ", takes off"
    columns = ["after", "stream at first", "stream at last", "most of a byte", "mixer", "channels"]
    return table("Residual stream and what is added to it: root-mean-square", columns, rows)


def _streams(report: "ProbeReport") -> Iterator[Table]:
    """Show what several streams are read and written by, the least and the largest."""
    ranges = report.readings[-1].stream_ranges
    if ranges:
        rows = [
            [f"block {index}", *(_pair(*ends) for ends in zip(of[::2], of[1::2], strict=True))]
            for index, of in enumerate(ranges)
        ]
        columns = ["of", "mixer reads", "mixer writes", "channels read", "channels write"]
        yield table("Streams: weights that branches read and write by", columns, rows)


def _pair(least: float | None, most: float | None) -> str:
    return f"{_number(least, 3)} to {_number(most, 3)}"


def _tensors(report: "ProbeReport") -> Table:
    columns = ["tensor", "up", "down", "to 0", "off 0", "still", "step", "full"]
    title = (
        "Trits: % flipped in a step on average, and never; size of a step over lr * P / 16;"
        " % of the fullest digit at its ends"
    )
    return table(title, columns, [_tensor_row(tensor) for tensor in report.tensors])


def _tensor_row(tensor: "TensorReport") -> list[str]:
    return [
        tensor.name.removeprefix("blocks.").removesuffix(".weight"),
        _percent(tensor.up_share),
        _percent(tensor.down_share),
        _percent(tensor.into_zero_share),
        _percent(tensor.out_of_zero_share),
        _percent(tensor.still_share),
        _number(tensor.update_size, 2),
        _percent(max(digit.saturated_share for digit in tensor.digits.values())),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"

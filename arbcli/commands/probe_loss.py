"""`arb probe-loss`: diagnostics of a few training steps."""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from arbcli.base.output import LiveLine, bytes_text, chunked_text, emit, note, table
from arbcli.base.run_files import require_run
from arbcli.commands import _options as opt
from arbcli.commands._help import combining
from arbcli.commands._outputs import PICTURES, check_file
from arbcli.config.presets import config_from_dict

if TYPE_CHECKING:
    from arbcli.inspect.decoding import DecodingProbe
    from arbcli.inspect.verdicts import ChunkReport, ProbeReport, TensorReport

STEPS = 12
"""Enough for warm-up to end, and for votes to accumulate, flip and accumulate again."""
STEP_FIELDS = ("data", "val", "field", "data_format", "batch", "lr", "seed", "compute")
"""Fields that can be set for a saved model; it keeps its own values of all others."""


_RUN = typer.Argument(metavar=opt.NAMED, help=f"Saved model to probe, not changed: {opt.NAMES_RUN}")
_DECODE = typer.Option(
    min=2,
    metavar="POSITIONS",
    help="Instead of steps: read so many positions, decode one, and show its sizes.",
)
_PLOT = typer.Option(help="Plot residual stream, flips, loss, logits: .png, .pdf or .svg.")


@combining({"--decode": ("--plot",)}, {"--field": "--data"})
@opt.takes_settings(*STEP_FIELDS, "tokenizer")
def probe_loss(
    run: Annotated[Path | None, _RUN] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = STEPS,
    warmup: opt.HalfWarmup = None,
    backend: opt.Backend = None,
    device: opt.Device = None,
    checkpoint: opt.Checkpoint = None,
    decode: Annotated[int | None, _DECODE] = None,
    plot: Annotated[Path | None, _PLOT] = None,
    as_json: opt.Json = False,
    **settings: Any,
) -> None:
    """Diagnose a few training steps: `arb probe-loss --rule votes`.

    A new model runs a complete schedule of `--steps` steps. Exit 0 if the verdict is ok, else 1.
    """
    if plot is not None:
        check_file(plot, "--plot", PICTURES)
    settings = opt.given_options(**settings, warmup=warmup)
    steps = settings.pop("steps", steps)  # of `--set`
    path = None if run is None and checkpoint is None else opt.one_path(run, checkpoint)
    if path is None:
        settings = opt.expand_model_file(settings)
        opt.check_settings(settings | {"steps": steps})
    else:
        changed = [name for name in settings if name not in STEP_FIELDS]
        opt.refuse_kept(changed, "probe a new model")
        path = opt.find_run(path, loads=True)
        require_run(path)  # a probe continues the training of a run
    with LiveLine("loading") as line:
        from arbcli.inspect import probe, room  # slow to import, and not needed for `arb --help`
        from arbcli.inspect.plots import plot_probe, require_matplotlib
        from arbcli.training.configure import new_config

        if plot is not None:
            require_matplotlib()
        report: ProbeReport | DecodingProbe
        settings |= {"device": device, "backend": backend}
        if path is None:
            config, saved = new_config(steps=steps, **settings), None
            room.check_memory(config)
        else:
            config, saved = probe.open_saved(path, steps=steps, note=note, **settings)
        if decode is not None:
            from arbcli.inspect.decoding import probe_decoding

            report = probe_decoding(config, decode, saved)
            tables = _decoding_tables(report)
        else:
            report = probe.probe(config, steps=steps, checkpoint=saved, progress=line.show_wait)
            tables = _tables(report)
    emit(report, tables, as_json=as_json)
    if plot is not None:
        plot_probe(dataclasses.asdict(report), plot)
    raise typer.Exit(0 if report.passed else 1)


def _decoding_tables(report: "DecodingProbe") -> Group:
    rows = [
        [
            block.name,
            _number(block.stream, 2),
            ", ".join(f"{name} {_number(size, 2)}" for name, size in block.branches.items()),
            _pair(block.attention_min, block.attention_max, 1),
        ]
        for block in report.blocks
    ]
    verdict = "all finite" if report.passed else "NOT FINITE"
    low, high = _number(report.logit_min, 1), _number(report.logit_max, 1)
    return Group(
        f"{verdict}: position {report.prefill} on {report.device}, {report.compute}; logits"
        f" {low} to {high}, cache of {bytes_text(report.cache_bytes)}",
        table(
            "Decoded position: largest value of the stream and of what is added to it",
            ["block", "stream", "branches", "attention logits"],
            rows,
            left=1,
        ),
    )


def _tables(report: "ProbeReport") -> Group:
    config, model, last = report.config, report.config["model"], report.readings[-1]
    rules = config_from_dict(model).rule_text
    starts = [*report.position_starts, model["ctx"]]
    buckets = zip(pairwise(starts), last.loss_by_position, strict=True)
    losses_text = "  ".join(f"{a}-{b - 1}: {_number(loss, 2)}" for (a, b), loss in buckets)
    growths = zip(pairwise(starts), last.growth_by_position, strict=False)
    growth = "  ".join(f"{a}-{b - 1}: {_number(value, 2)}" for (a, b), value in growths)
    scales = [tensor.digits["scale"] for tensor in report.tensors]
    lowest, highest = min(scale.low for scale in scales), max(scale.high for scale in scales)
    return Group(
        *(f"verdict           {verdict.name}: {verdict.evidence}" for verdict in report.verdicts),
        f"model             {rules}, {report.num_weights:,} weights, {model['scale_type']},"
        f" {config['device']}, backend {config['backend']}, {config['compute']}; {report.text}",
        f"held-out loss     {_number(last.val_loss, 4)} nats; uniform {report.uniform_loss:.4f},"
        f" order-0 entropy {report.text_entropy:.4f}",
        f"by position       {losses_text}",
        *([f"growth            {growth}"] if growth else []),
        f"scales            v from {lowest} to {highest}, in 1/128 octaves",
        f"first NaN or Inf  {report.first_nonfinite or 'none'}",
        f"causality         {report.acausal_logits} predictions moved by a later byte"
        + _layers_text(report.acausal_layers),
        f"memory            {bytes_text(report.state_bytes)} state,"
        f" {bytes_text(last.live_bytes)} live, {bytes_text(report.peak_bytes)} peak",
        *(_chunks(report.chunks) if report.chunks else ()),
        _steps(report),
        _layers(report),
        *_streams(report),
        _tensors(report),
    )


def _layers_text(moved: tuple[int, ...]) -> str:
    return f", and {sum(moved)} positions of {len(moved)} layers" if moved else ""


def _chunks(chunks: "ChunkReport") -> Iterator[str | Text]:
    lengths = ", then ".join(f"{length:.2f}" for length in chunks.mean_lengths)
    if not chunks.sample_bytes:
        yield f"chunks            {lengths} tokens on average"
        return
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
    columns = ["step", "lr", "loss", "held out", "flips", "growth", "logits", "spread"]
    columns += ["entropy"]
    title = "Steps: losses and entropy in nats, flips in %, growth of the residual stream"
    return table(title, columns, rows)


def _layers(report: "ProbeReport") -> Table:
    first, last = report.readings[0], report.readings[-1]
    names = ["embedding", *(f"block {index}" for index in range(len(last.channel_rms)))]
    branches = zip((None, *last.mixer_rms), (None, *last.channel_rms), strict=True)
    figures = zip(first.residual_rms, last.residual_rms, last.residual_most, branches, strict=True)
    rows = [
        [name, *(_number(size, 3) for size in (before, after, largest, *branch))]
        for name, (before, after, largest, branch) in zip(names, figures, strict=True)
    ]
    if last.takeoff_layer is not None:
        rows[last.takeoff_layer + 1][0] += ", takes off"
    columns = ["after", "stream at first", "stream at last", "most of a byte", "mixer", "channels"]
    return table("Residual stream and what is added to it: root-mean-square", columns, rows)


def _streams(report: "ProbeReport") -> Iterator[Table]:
    """Show the ranges of the weights that read and write the residual streams."""
    ranges = report.readings[-1].stream_ranges
    if ranges:
        rows = [
            [f"block {index}", *(_pair(*ends) for ends in zip(of[::2], of[1::2], strict=True))]
            for index, of in enumerate(ranges)
        ]
        columns = ["of", "mixer reads", "mixer writes", "channels read", "channels write"]
        yield table("Streams: weights that branches read and write by", columns, rows)


def _pair(low: float | None, high: float | None, digits: int = 3) -> str:
    no_range = low is None and high is None
    return "-" if no_range else f"{_number(low, digits)} to {_number(high, digits)}"


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

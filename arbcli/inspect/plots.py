"""Pictures of a run and of a probe, as PNG, PDF or SVG files. Only they need matplotlib."""

import math
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbcli.base.atomic_files import write_file
from arbcli.base.errors import ArbError
from arbcli.base.reading import read_json
from arbcli.base.run_files import CONFIG
from arbcli.config.presets import config_from_dict
from arbcli.inspect.runs import RunComparison
from arbcli.inspect.verdicts import MIN_SPREAD
from arbcli.training.record import as_number, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIFORM = math.log(256)
INK, FAINT = "#333333", "#999999"
BLUE, ORANGE, GREEN = "#1f6fb4", "#e07b00", "#2a9d4e"
MAX_LABEL = 40
"""Maximum length of a run's settings in a legend; longer ones are replaced by its name."""


def require_matplotlib() -> None:
    """Check that matplotlib is installed, before a run that ends with a plot.

    Raises:
        ArbError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ArbError(
            "`--plot` needs matplotlib",
            "install it with `pip install 'arb[plot]'`, or leave `--plot` out",
        )


def plot_training(run: Path, png: Path) -> None:
    """Draw the losses of a run from its `metrics.jsonl` and `config.json`.

    Raises:
        ArbError: matplotlib is missing, the run cannot be read, or the file cannot be written.
    """
    facts = read_json(run / CONFIG, {"text": dict, "text.entropy": float})
    records = read_records(run)
    if not records:
        raise ArbError(f"`{run}` has no records", "give the directory of a run")
    figure, (axes,) = _figure(1)
    evaluated = [record for record in records if record.get("val_loss") is not None]
    axes.plot(*_points(records, "loss"), color=BLUE, linewidth=1.2, label="training")
    axes.plot(*_points(evaluated, "val_loss"), "o-", color=ORANGE, markersize=5, label="held out")
    if evaluated:
        last = evaluated[-1]
        axes.annotate(
            f"{last['val_loss']:.3f}", (last["step"], last["val_loss"]), xytext=(0, -14),
            textcoords="offset points", ha="right", color=ORANGE,
        )  # fmt: skip
    _mark_losses(axes, facts["text"]["entropy"])
    _label(axes, f"{run.name}: loss", "step", "nats a byte")
    axes.legend(frameon=False, fontsize=8)
    _save(figure, png)


def plot_runs(report: RunComparison, png: Path) -> None:
    """Draw held-out and training losses of several runs, one colour for each group.

    Args:
        report: the comparison of the runs.
        png: file to write.

    Raises:
        ArbError: matplotlib is missing, a run cannot be read, or the file cannot be written.
    """
    figure, (held_out, training) = _figure(2)
    for number, group in enumerate(report.groups):
        shown = ", ".join(f"{name} {value}" for name, value in group.settings.items())
        label = shown if shown and len(shown) <= MAX_LABEL else Path(group.runs[0]).name
        for run in group.runs:
            records = read_records(Path(run))
            evaluated = [record for record in records if record.get("val_loss") is not None]
            style: dict[str, Any] = {"color": f"C{number % 10}", "linewidth": 1.2}
            style["label"] = label.replace("$", r"\$")
            held_out.plot(*_points(evaluated, "val_loss"), "o-", markersize=3, **style)
            training.plot(*_points(records, "loss"), **style)
            label = ""  # a legend has each group once
    held_out.legend(frameon=False, fontsize=8)
    _label(held_out, "held-out loss", "step", "nats a byte")
    _label(training, "training loss", "step", "nats a byte")
    _save(figure, png)


def plot_probe(report: dict[str, Any], png: Path) -> None:
    """Draw residual stream, flips, losses and logits of a probe.

    Besides, lengths of chunks, if there are any.

    Args:
        report: the object that `arb probe-loss --json` prints.
        png: file to write.

    Raises:
        ArbError: matplotlib is missing, or the file cannot be written.
    """
    chunks = report["chunks"]
    readings = report["readings"]
    first, last = readings[0], readings[-1]
    figure, (stream, flips, loss, logits, *more) = _figure(4 + bool(chunks))
    for reading, color in ((first, FAINT), (last, BLUE)):
        label = f"after step {reading['step']}"
        sizes = [as_number(size) for size in reading["residual_rms"]]
        stream.plot(range(len(sizes)), sizes, "o-", color=color, markersize=4, label=label)
    largest = [as_number(size) for size in last["residual_most"]]
    stream.plot(
        range(len(largest)), largest, "^:", color=BLUE, markersize=3, label="largest of a byte"
    )
    for name, color in (("mixer_rms", ORANGE), ("channel_rms", GREEN)):
        sizes = [as_number(size) for size in last[name]]
        label = name.replace("channel_rms", "channel mixer").removesuffix("_rms")
        stream.plot(range(1, len(sizes) + 1), sizes, "s--", color=color, markersize=3, label=label)
    stream.set_yscale("log", base=2)
    stream.yaxis.set_major_formatter("{x:g}")
    stream.legend(frameon=False, fontsize=8)
    _label(stream, "residual stream", "blocks passed", "root-mean-square")

    steps, shares = _points(readings[1:], "flip_share")
    flips.bar(steps, [100 * share for share in shares], color=BLUE, width=0.7)
    _label(flips, "trits flipped by a step", "step", "% of all")

    loss.plot(*_points(readings, "val_loss"), "o-", color=ORANGE, markersize=4, label="held out")
    steps, losses = _points(readings[1:], "loss")
    # a step's own loss is measured before its update
    loss.plot([step - 1 for step in steps], losses, color=BLUE, linewidth=1.2, label="training")
    _mark_losses(loss, report["text_entropy"], report["uniform_loss"])
    loss.legend(frameon=False, fontsize=8)
    _label(loss, "loss", "steps done", "nats a symbol")

    logits.plot(*_points(readings, "logit_spread"), "o-", color=BLUE, markersize=4)
    logits.set_ylim(bottom=0)
    logits.axhline(MIN_SPREAD, color=FAINT, linestyle=":", linewidth=1)
    _label(logits, "spread of logits", "steps done", "standard deviation")

    for axes in more:
        counts = chunks["lengths"]
        axes.bar(range(1, len(counts) + 1), counts, color=GREEN, width=0.8)
        mean = chunks["mean_lengths"][0]
        axes.axvline(mean, color=ORANGE, linewidth=1.2, label=f"mean {mean:.2f}")
        axes.legend(frameon=False, fontsize=8)
        unit = "bytes" if chunks["sample_bytes"] else "tokens"
        _label(axes, "chunks of the held-out text", f"{unit} of a chunk", "chunks")

    model = report["config"]["model"]
    rules = config_from_dict(model).rule_text
    verdicts = ", ".join(verdict["name"] for verdict in report["verdicts"])
    shape = (
        f"{report['num_weights'] / 1e6:.2f} M weights, {model['scale_type']}, ctx {model['ctx']}"
    )
    figure.suptitle(f"{rules}: {verdicts}   ({shape})", color=INK, fontsize=12)
    _save(figure, png)


def _figure(columns: int) -> "tuple[Figure, list[Axes]]":
    require_matplotlib()
    # Agg needs no display, and a Figure of its own leaves pyplot's global state alone
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    width = 7.2 if columns == 1 else 4.4 * columns
    figure = Figure(figsize=(width, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        panel.margins(y=0.1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors=INK, labelsize=8)
        panel.grid(axis="y", color="#eeeeee")
        panel.set_axisbelow(True)
    return figure, axes


def _mark_losses(axes: "Axes", entropy: float, uniform: float = UNIFORM) -> None:
    """Draw losses to compare with, labelled at the right edge."""
    for value, name in ((uniform, "uniform"), (entropy, "order 0")):
        axes.axhline(value, color=FAINT, linestyle=":", linewidth=1)
        edge = axes.get_yaxis_transform()  # x as a share of the width, y in data
        axes.annotate(f"{name}\n{value:.3f}", (1, value), xycoords=edge, color=INK,
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip


def _label(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title.replace("$", r"\$"), loc="left", color=INK, fontsize=10)
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)


def _points(records: Iterable[dict[str, Any]], y: str) -> tuple[list, list]:
    pairs = [(record["step"], as_number(record[y])) for record in records]  # NaN is a gap
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _save(figure: "Figure", png: Path) -> None:
    form = png.suffix.removeprefix(".").lower()
    write_file(png, lambda file: figure.savefig(file, format=form), "choose another `--plot`")

"""Draw the figures of README.md and `docs/` from `benchmarks/results/`.

    python -m benchmarks.plots

Needs matplotlib: `pip install '.[plot]'`.
"""

from typing import Any

import matplotlib

from benchmarks.fits import fit
from benchmarks.results import load
from benchmarks.tables.pages import ROOT
from benchmarks.tables.results import (
    FRONTIER_BUDGETS,
    FRONTIER_SECONDS,
    best_within,
)
from benchmarks.tables.rows import Runs, measured_row, row_of, rows_of
from benchmarks.tables.steps import PRESETS, faster, speed_ratio

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "arb"  # so that the same results give the same file
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot  # noqa: E402  a backend is chosen before

COLOURS = {
    "ternary": "#1769aa",
    "all digits": "#2e8b57",
    "straight-through": "#b8860b",
    "float": "#888888",
}
CURVES = {
    "nibble, all digits": "--rule nibble --weights int8",
    "moment, all digits": "--rule moment --weights int8 --lr 0.5",
    "AdamW": "--weights float --lr 1e-3",
    "Muon": "--weights float --optimizer muon --lr 3e-3",
}
"""Options of runs of `base`, by their names in `LINES`."""
POINTS = {
    "moment": "--rule moment",
    "nibble": "--rule nibble",
    "moment, all digits": "--weights int8",
    "nibble, all digits": "--rule nibble --weights int8",
    "moment, faded": "--rule moment --weights anneal",
    "nibble, faded": "--rule nibble --weights anneal",
    "carry": "--rule carry",
    "straight-through, Muon": "--weights ste --optimizer muon --lr 3e-3",
    "float, AdamW": "--weights float --lr 1.5e-3",
    "float, Muon": "--weights float --optimizer muon --lr 3e-3",
}
"""Options of runs of `small`, by their labels."""


def draw_loss(runs: Runs) -> Any:
    """Draw held-out loss against the memory of the training state, and a long run's losses.

    Every seed of `small` on the novels is a point, and every kind of `base` on code a curve.
    """
    figure, (axes, course) = pyplot.subplots(1, 2, figsize=(11, 4.1), width_ratios=(3, 2))
    for label, options in POINTS.items():
        rows = rows_of(runs, preset="small", options=options)
        below = rows[0]["kind"] != "ternary" or "anneal" in options
        losses = [row["held_out_nats"] for row in rows]
        state, colour = rows[0]["state_mib"], COLOURS[rows[0]["kind"]]
        axes.plot([state] * len(rows), losses, "o", color=colour)
        axes.annotate(
            label, (state, min(losses) if below else max(losses)), (0, -14 if below else 7),
            textcoords="offset points", ha="center", color=colour,
        )  # fmt: skip
    axes.set(
        xscale="log", xlim=(9, 200), ylim=(1.13, 1.345),
        xlabel="training state in MiB: weights and what the rule or optimizer keeps",
        ylabel="held-out loss, nats a byte",
    )  # fmt: skip
    axes.set_xticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    for kind, options in CURVES.items():
        row = measured_row(load("code_base"), options=options, seed=0)
        label, colour, mark = LINES[kind]
        course.plot(*zip(*row["curve"], strict=True), mark, ls="-", color=colour, label=label)
    course.set(title="base on source code", xlabel="steps", ylabel="held-out loss, nats a byte")
    axes.set(title="small on the novels")
    course.grid(alpha=0.3)
    course.legend(frameon=False)
    return figure


def draw_speed(runs: Runs) -> Any:
    """Draw the speed of training steps as a share of the faster baseline's."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    bars = [
        (f"{title} against {twin}", [
            speed_ratio(runs, row, faster(runs, row, twin))
            for row in (row_of(runs, preset=preset, kind=kind) for preset in PRESETS)
        ])
        for kind, title, twin in (
            ("factored", "factored", "AdamW"),
            ("factored, fp8", "factored, fp8", "AdamW"),
            ("orthogonal", "orthogonal", "Muon"),
        )
    ]  # fmt: skip
    bars = [(label, ratios) for label, ratios in bars if any(ratios)]
    for index, (label, ratios) in enumerate(bars):
        known = [(place, ratio) for place, ratio in enumerate(ratios) if ratio is not None]
        width = 0.8 / len(bars)
        places = [place + width * (index - (len(bars) - 1) / 2) for place, _ in known]
        drawn = axes.bar(places, [ratio for _, ratio in known], 0.9 * width, label=label)
        axes.bar_label(drawn, fmt="%.2f", fontsize=9)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(PRESETS)), PRESETS)
    axes.set(ylabel="speed relative to the float baseline")
    axes.legend(loc="upper left", frameon=False)
    axes.set_ylim(0, 1.15 * max(ratio for _, heights in bars for ratio in heights if ratio) + 0.15)
    return figure


LINES = {
    "AdamW": ("float, AdamW", "#888888", "s"),
    "Muon": ("float, Muon", "#444444", "D"),
    "straight-through, Muon": ("straight-through, Muon", "#b8860b", "v"),
    "nibble": ("nibble", "#6fa8dc", "^"),
    "moment": ("moment", "#1769aa", "o"),
    "nibble, all digits": ("nibble, all digits", "#8fce9f", "^"),
    "moment, all digits": ("moment, all digits", "#2e8b57", "o"),
}
"""How a kind of training is drawn: label, colour and mark."""


def draw_scaling(runs: Runs) -> Any:
    """Draw held-out loss against the bytes read, a curve of each kind's law for every size."""
    sizes = sorted({row["weights"] for row in rows_of(runs)})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(2.6 * len(sizes), 3.6), sharey=True)
    for weights, part in zip(sizes, axes, strict=True):
        for kind, (label, colour, mark) in LINES.items():
            rows = sorted(rows_of(runs, kind=kind, weights=weights), key=lambda row: row["bytes"])
            read = [row["bytes"] for row in rows]
            losses = [row["held_out_nats"] for row in rows]
            part.plot(read, losses, mark, color=colour, label=label, markersize=4)
            curve = fit(rows_of(runs, kind=kind))
            if curve and rows:
                part.plot(read, [curve.law.loss(weights, n) for n in read], color=colour)
        part.set(xscale="log", yscale="log", title=f"{weights / 1e6:.1f} M weights")
        part.set(xlabel="million bytes read")
        part.set_xticks(sorted({row["bytes"] for row in rows_of(runs)}))
        part.xaxis.set_major_formatter(lambda read, _: f"{read / 1e6:.0f}")
        part.xaxis.set_minor_formatter("")
        part.yaxis.set_major_formatter("{x:.2f}")
        part.yaxis.set_minor_formatter("{x:.2f}")
        part.grid(alpha=0.3, which="both")
    axes[0].set(ylabel="held-out loss, nats a byte")
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def draw_frontier(runs: Runs) -> Any:
    """Draw the lowest loss that each kind reaches within a peak of memory."""
    figure, axes = pyplot.subplots(figsize=(8, 4.1))
    losses = load("scaling")
    peaks = sorted({min(row["peak_mib"], FRONTIER_BUDGETS[-1]) for row in rows_of(runs)})
    for kind, (label, colour, _) in LINES.items():
        best = [(peak, best_within(runs, losses, kind, peak)) for peak in peaks]
        known = [(peak, point[0]) for peak, point in best if point]
        if known:
            known.append((FRONTIER_BUDGETS[-1], known[-1][1]))
            axes.step(*zip(*known, strict=True), where="post", color=colour, label=label)
    axes.set(
        xscale="log", xlabel="peak of memory in MiB",
        ylabel=f"held-out loss after {FRONTIER_SECONDS} s of one GPU, nats a byte",
    )  # fmt: skip
    axes.set_xticks(FRONTIER_BUDGETS, [f"{budget}" for budget in FRONTIER_BUDGETS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


SHADES = ("#1769aa", "#b8860b", "#2e8b57", "#8e44ad", "#6fa8dc", "#c0504d", "#888888")
"""Colours of kinds of kernels."""


def draw_step_budget(runs: Runs) -> Any:
    """Draw the time of a step by kind of kernel as a share of all, and in it what must be."""
    rows = rows_of(runs)
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["kinds"]))
    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(rows) + 1.4))
    for place, row in enumerate(rows):
        total, left = sum(entry["ms"] for entry in row["kinds"].values()), 0.0
        for kind, colour in zip(kinds, SHADES, strict=True):
            entry = row["kinds"][kind]
            width = entry["ms"] / total
            least = min(entry["floor_ms"] / total, width)
            label = kind if place == 0 else None
            axes.barh(place, width, left=left, color=colour, alpha=0.4, edgecolor="white")
            axes.barh(place, least, left=left, color=colour, label=label)
            left += width
    names = [f"{row['model']}: {row['step_ms']:.1f} ms" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the kernels' time; full colour: at the machine's rates")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=4, frameon=False, fontsize=8)
    return figure


FIGURES = {
    "step-budget": ("step_budget", draw_step_budget),
    "loss-against-memory": ("quality", draw_loss),
    "speed": ("training_step", draw_speed),
    "scaling": ("scaling", draw_scaling),
    "frontier": ("frontier", draw_frontier),
}
"""Benchmark and drawing function by the name of a file in `docs/`."""


def main() -> None:
    """Write every figure."""
    for name, (file, draw) in FIGURES.items():
        path, runs = ROOT / "docs" / f"{name}.svg", load(file)
        if not runs:
            continue
        figure = draw(runs)
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)


if __name__ == "__main__":
    main()

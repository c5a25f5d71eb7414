"""Draw the figures of README.md and `docs/` from `docs/results/`.

    python -m benchmarks.plots

Needs matplotlib: `pip install '.[plot]'`.
"""

from typing import Any

import matplotlib

from benchmarks.results import load
from benchmarks.tables import PRESETS, ROOT, Runs, faster, row_of, rows_of, speed_ratio

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
LABELS = {
    "--rule moment": "moment",
    "--rule nibble": "nibble",
    "--rule moment --digits all": "moment, all digits",
    "--rule nibble --digits all": "nibble, all digits",
    "--rule carry": "carry",
    "--weights ste --optimizer muon --lr 3e-3": "straight-through, Muon",
    "--weights float --lr 1e-3": "float, AdamW",
    "--weights float --optimizer muon --lr 3e-3": "float, Muon",
}
"""What is drawn, by options of a run."""


def draw_loss(runs: Runs) -> Any:
    """Draw held-out loss against the memory of the training state, every seed a point."""
    figure, axes = pyplot.subplots(figsize=(8, 4.1))
    for options, label in LABELS.items():
        rows = rows_of(runs, preset="small", options=options)
        losses = [row["held_out_nats"] for row in rows]
        state, colour = rows[0]["state_mib"], COLOURS[rows[0]["kind"]]
        axes.plot([state] * len(rows), losses, "o", color=colour)
        axes.annotate(
            label, (state, max(losses)), (0, 7), textcoords="offset points", ha="center",
            color=colour,
        )  # fmt: skip
    axes.set(
        xscale="log", xlim=(9, 200), ylim=(1.14, 1.345),
        xlabel="training state in MiB: weights and what the rule or optimizer keeps",
        ylabel="held-out loss, nats a byte",
    )  # fmt: skip
    axes.set_xticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    return figure


def draw_speed(runs: Runs) -> Any:
    """Draw the speed of training steps as a share of the faster twin's."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    bars = [
        (f"{title} against {twin}", [
            speed_ratio(row_of(runs, preset=preset, kind=kind), faster(runs, preset, twin))
            for preset in PRESETS
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
    axes.set(ylabel="speed, the float twin's being 1")
    axes.legend(loc="upper left", frameon=False)
    axes.set_ylim(0, 1.15 * max(ratio for _, found in bars for ratio in found if ratio) + 0.15)
    return figure


FIGURES = {
    "loss-against-memory": ("quality", draw_loss),
    "speed": ("training_step", draw_speed),
}
"""By the name of a file in `docs/`: whose results, and what draws it."""


def main() -> None:
    """Write every figure."""
    for name, (file, draw) in FIGURES.items():
        path = ROOT / "docs" / f"{name}.svg"
        figure = draw(load(file))
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)


if __name__ == "__main__":
    main()

"""Tables of `docs/results.md`."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean

from benchmarks.fits import between, fit
from benchmarks.results import load
from benchmarks.tables.cells import markdown, measured, number, source
from benchmarks.tables.rows import Row, Runs, Tables, only, rows_of

LEFT_TO_LOG = "=factored"
"""Options whose losses are in the log alone: factored steps of the embedding and the head."""


def seeds_of(rows: Sequence[Row]) -> list[tuple[list[Row], str]]:
    """Group rows by options and steps: rows in order of seeds, and their losses as a cell.

    The group with the lowest mean loss comes first.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        groups.setdefault((row["options"], row["steps"]), []).append(row)
    shown = [group for (options, _), group in groups.items() if LEFT_TO_LOG not in options]
    ordered = sorted(shown, key=lambda group: mean(row["held_out_nats"] for row in group))
    return [(group, ", ".join(f"{row['held_out_nats']:.4f}" for row in group)) for group in ordered]


def quality(runs: Runs) -> str:
    """Loss by state, `small`."""
    lines = [
        [group[0]["kind"], f"`{group[0]['options']}`", losses, f"{group[0]['state_mib']} MiB"]
        for group, losses in seeds_of(rows_of(runs, preset="small"))
    ]
    head = ["weights", "options", "loss, each seed", "state"]
    return markdown(head, lines) + source(only(runs, preset="small"))


CURVE_STEPS = (500, 1000, 2000)
"""Steps whose losses the table of a run on source code has, besides those of its end."""


def curves_of_code(runs: Runs) -> str:
    """Mean loss of seeds in the course of a run on source code, and state, `base`."""
    lines = []
    for group, losses in seeds_of(rows_of(runs)):
        curves = [dict(row["curve"]) for row in group]
        means = [f"{mean(curve[step] for curve in curves):.4f}" for step in CURVE_STEPS]
        steps, state = group[0]["steps"], f"{group[0]['state_mib']:g}"
        note = "" if steps == 3000 else f", {steps:,} steps"
        lines.append([f"`{group[0]['options']}`{note}", *means, losses, state])
    head = ["options", *(f"{step:,} steps" for step in CURVE_STEPS), "end, each seed", "state, MiB"]
    return markdown(head, lines) + source(runs)


def losses_by_size(runs: Runs) -> str:
    """Held-out losses of every kind by size and length, one seed."""
    rows = rows_of(runs, seed=0)
    lengths = sorted({row["steps"] for row in rows})
    groups: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        place = groups.setdefault((row["kind"], row["weights"]), {})
        place[row["steps"]] = row["held_out_nats"]
    lines = [
        [kind, f"{weights / 1e6:.1f} M", *(number(losses.get(steps), ".4f") for steps in lengths)]
        for (kind, weights), losses in sorted(groups.items())
    ]
    return measured(["kind", "weights", *(f"{n:,} steps" for n in lengths)], lines, runs)


def laws(runs: Runs) -> str:
    """The law that is fitted to each kind's losses, each number with its standard error."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows_of(runs)):
        curve = fit(rows_of(runs, kind=kind))
        if curve:
            pairs = zip(curve.law, curve.errors, strict=True)
            numbers = [
                f"{value:.2f} ± {error:.2f}" if isfinite(error) else "not determined"
                for value, error in pairs
            ]
            lines.append([kind, *numbers, f"{curve.residual:.2%}".replace("%", " %")])
    return measured(["kind", "E", "A", "B", "a", "b", "residual"], sorted(lines), runs)


def shakespeare(runs: Runs) -> str:
    """Lowest held-out losses of tiny Shakespeare, with seconds and state."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows_of(runs)):
        rows = sorted(rows_of(runs, kind=kind), key=lambda row: row["seed"])
        losses = [row["best_nats"] for row in rows]
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        lines.append(
            [
                SHAKESPEARE.get(kind, kind),
                f"**{mean(losses):.4f}**",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{rows[0]['best_step']:,}",
                ", ".join(f"{time:.0f}" for time in seconds),
                f"{rows[0]['state_mib']} MiB",
            ]
        )
    head = ["model", "lowest loss", "by seed", "at step", "seconds", "weights and optimizer state"]
    return measured(head, lines, runs)


SHAKESPEARE = {
    "trit": "ternary",
    "all": "int8 (all digits)",
    "adamw": "float AdamW",
    "muon": "float Muon",
    "nanoGPT": "nanoGPT's recipe, compiled and captured",
}
"""Names of the kinds of `shakespeare`."""
FRONTIER_SECONDS = 7.2
"""Seconds of one GPU, in which AdamW makes 2,000 steps of 10.8 million weights."""


FRONTIER_BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
"""MiB."""


def best_within(steps: Runs, losses: Runs, kind: str, budget: float) -> tuple[float, Row] | None:
    """Return the lowest loss of a kind within a time and memory, and its step.

    Args:
        steps: results of `frontier`.
        losses: results of `scaling`.
        kind: of training.
        budget: of the peak, in MiB.
    """
    points = []
    for row in rows_of(steps, kind=kind):
        lengths = rows_of(losses, kind=kind, shape=row["shape"], seed=0)
        count = 1e3 * FRONTIER_SECONDS / row["ms"]
        enough = any(count >= length["steps"] for length in lengths)
        if row["peak_mib"] <= budget and enough:
            points.append((between(lengths, count), row))
    return min(points, key=lambda pair: pair[0], default=None)


def frontier(runs: Runs) -> str:
    """The best held-out loss of every kind by budget of memory, and the model that has it."""
    losses, lines = load("scaling"), []
    for kind in sorted({row["kind"] for row in rows_of(runs)}):
        cells = []
        for budget in FRONTIER_BUDGETS:
            best = best_within(runs, losses, kind, budget)
            cells.append(f"{best[0]:.3f} ({best[1]['weights'] / 1e6:.1f} M)" if best else "")
        lines.append([kind, *cells])
    head = ["peak, at most", *(f"{budget:,} MiB" for budget in FRONTIER_BUDGETS)]
    return measured(head, lines, runs)


TABLES: Tables = {
    "quality-small": ("quality", quality),
    "quality-code": ("code", quality),
    "shakespeare": ("shakespeare", shakespeare),
    "scaling": ("scaling", losses_by_size),
    "scaling-laws": ("scaling", laws),
    "frontier": ("frontier", frontier),
    "curves-code": ("code_base", curves_of_code),
}

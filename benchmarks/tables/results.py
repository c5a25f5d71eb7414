"""Tables of `docs/results.md`."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean

from benchmarks.fits import between, fit
from benchmarks.results import load
from benchmarks.tables.cells import markdown, measured, number, source
from benchmarks.tables.rows import Row, Runs, Tables, only, rows_of


def quality_of_small(runs: Runs) -> str:
    """Loss by state, with commits, `small`."""
    return losses_by_state(runs, "small", ("options", "held-out loss", "state", "commit"))


def losses_by_state(runs: Runs, preset: str, head: Sequence[str]) -> str:
    """Write the losses of a preset by options, with the columns of `head`."""
    groups: dict[str, list[tuple[Row, str]]] = {}
    for run in runs:
        for row in rows_of([run], preset=preset):
            groups.setdefault(row["options"], []).append((row, run["commit"]))
    lines = []
    # the lowest mean comes first
    means = {o: mean(row["held_out_nats"] for row, _ in pairs) for o, pairs in groups.items()}
    for options in sorted(groups, key=means.__getitem__):
        pairs = sorted(groups[options], key=lambda pair: pair[0]["seed"])
        rows = [row for row, _ in pairs]
        first, last = rows[0]["seed"], rows[-1]["seed"]
        seeds = f"{first} to {last}" if last - first > 1 else f"{first}, {last}"
        cells = {
            "weights": rows[0]["kind"],
            "options": f"`{options}`" + (f", seeds {seeds}" if len(rows) > 1 else ""),
            "held-out loss": ", ".join(f"{row['held_out_nats']:.4f}" for row in rows),
            "state": f"{rows[0]['state_mib']} MiB",
            "commit": ", ".join(dict.fromkeys(f"`{commit}`" for _, commit in pairs)),
        }
        lines.append([cells[name] for name in head])
    return markdown(head, lines) + source(only(runs, preset=preset))


def quality_of_code(runs: Runs) -> str:
    """Loss by state on source code, `small`."""
    return losses_by_state(runs, "small", ("weights", "options", "held-out loss", "state"))


CURVE_STEPS = (500, 1000, 2000, 3000)
"""Steps whose losses the table of a run on source code has."""


def curves_of_code(runs: Runs) -> str:
    """Loss in the course of a run on source code, and state, `base`."""
    lines = []
    for row in sorted(rows_of(runs), key=lambda row: row["held_out_nats"]):
        losses = dict(row["curve"])
        cells = [f"{losses[step]:.4f}" for step in CURVE_STEPS]
        lines.append([f"`{row['options']}`", f"{row['seed']}", *cells, f"{row['state_mib']:g}"])
    head = ["options", "seed", *(f"{step:,} steps" for step in CURVE_STEPS), "state, MiB"]
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
    "quality-small": ("quality", quality_of_small),
    "quality-code": ("code", quality_of_code),
    "shakespeare": ("shakespeare", shakespeare),
    "scaling": ("scaling", losses_by_size),
    "scaling-laws": ("scaling", laws),
    "frontier": ("frontier", frontier),
    "curves-code": ("code_base", curves_of_code),
}

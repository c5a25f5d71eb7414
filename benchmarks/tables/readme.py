"""Tables of `README.md`."""

from statistics import mean

from benchmarks.tables import results
from benchmarks.tables.cells import markdown, number, source
from benchmarks.tables.rows import Row, Runs, Tables, row_of, rows_of, value
from benchmarks.tables.steps import PRESETS, faster, speed_ratio

LEFT_TO_RESULTS = (
    "--no-sub-norms", "carry", "--lr 2e-3", "--weights ste --lr 3e-3", "--lr 0.35", "--lr 0.65",
    "--lr 5e-3", "--lr 1e-3", "--compute", "--lr 0.55", "--lr 0.6",
    "nibble --weights anneal",
)  # fmt: skip
"""Options that the short table leaves out: others of their kind do better, or as well."""


def quality(runs: Runs) -> str:
    """Loss by state, `small`, the best of each kind."""
    best = [run | {"rows": [row for row in run["rows"] if not _is_left_out(row)]} for run in runs]
    return results.quality(best)


def _is_left_out(row: Row) -> bool:
    return any(part in row["options"] for part in LEFT_TO_RESULTS)


def shakespeare(runs: Runs) -> str:
    """Mean lowest loss, state and seconds of every kind on tiny Shakespeare."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows_of(runs)):
        rows = rows_of(runs, kind=kind)
        seconds = next((row["seconds"] for row in rows if "seconds" in row), None)
        loss = number(mean(row["best_nats"] for row in rows), ".4f")
        state = f"{rows[0]['state_mib']} MiB"
        lines.append([results.SHAKESPEARE.get(kind, kind), loss, state, number(seconds, ".0f")])
    return markdown(["model", "lowest loss", "state", "seconds"], lines) + source(runs)


def speed(runs: Runs) -> str:
    """Bytes a second of a training step against the faster baseline's."""
    lines = []
    for preset in PRESETS:
        ours = row_of(runs, preset=preset, kind="factored")
        orthogonal = row_of(runs, preset=preset, kind="orthogonal")
        peer, of_orthogonal = faster(runs, ours, "AdamW"), faster(runs, orthogonal, "Muon")
        lines.append(
            [
                f"`{preset}`",
                f"{ours['weights'] / 1e6:,.1f} M" if ours else "",
                number(value(ours, "bytes_per_second")),
                number(value(peer, "bytes_per_second")),
                number(speed_ratio(runs, ours, peer), ".2f"),
                number(speed_ratio(runs, orthogonal, of_orthogonal), ".2f"),
            ]
        )
    head = ["preset", "weights", "`arb`, factored direction", "float AdamW", "ratio"]
    return markdown([*head, "ratio, orthogonal against Muon"], lines) + source(runs)


TABLES: Tables = {
    "quality": ("quality", quality),
    "shakespeare": ("shakespeare", shakespeare),
    "speed": ("training_step", speed),
}

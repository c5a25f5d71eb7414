"""Tables of `docs/streams.md`."""

from statistics import mean

from benchmarks.tables.cells import measured
from benchmarks.tables.rows import Runs, Tables, only, rows_of


def streams(runs: Runs) -> str:
    """Held-out loss of one and of several residual streams, by seed."""
    found = only(runs, part="streams")
    lines = []
    for variant, steps in dict.fromkeys((r["variant"], r["steps"]) for r in rows_of(found)):
        rows = rows_of(found, variant=variant, steps=steps)
        losses = [row["held_out_nats"] for row in sorted(rows, key=lambda row: row["seed"])]
        lines.append(
            [
                variant.replace("-", " "),
                f"{rows[0]['weights'] / 1e6:.2f} M",
                f"{steps:,}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{mean(losses):.4f}",
            ]
        )
    return measured(["streams", "weights", "steps", "nats by seed", "mean"], lines, found)


TABLES: Tables = {
    "streams": ("streams", streams),
}

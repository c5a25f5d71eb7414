"""Tables of `docs/arb-3b.md`."""

from statistics import mean

from benchmarks.tables.cells import MIB, measured
from benchmarks.tables.rows import Runs, Tables, only, rows_of


def gates(runs: Runs) -> str:
    """Held-out loss and the fullest expert, by the choice of experts."""
    found, lines = only(runs, part="gates"), []
    kinds = {(row["variant"], row["lr"], row["steps"]): None for row in rows_of(found)}
    for variant, lr, steps in sorted(kinds, key=lambda kind: ("factored" in kind[0], kind[1])):
        rows = rows_of(found, variant=variant, lr=lr, steps=steps)
        rows = sorted(rows, key=lambda row: row["seed"])
        lines.append(
            [
                f"`{variant.split('-')[0]}`" + ", shared expert" * ("shared" in variant),
                "`nibble`, factored" if "factored" in variant else "`moment`",
                f"{lr:g}",
                f"{steps:,}",
                ", ".join(f"{row['held_out_nats']:.4f}" for row in rows),
                ", ".join(f"{row['fullest_expert']:.2f}" for row in rows),
            ]
        )
    head = ["choice", "rule", "`--lr`", "steps", "nats by seed", "fullest expert over the mean"]
    return measured(head, lines, found)


def batches(runs: Runs) -> str:
    """Time and memory of a step by the number of windows, the first step apart."""
    rows = [row for row in rows_of(runs) if row["kind"] in ("tiny", "arb-3b")]
    used = [run for run in runs if any(row in rows for row in run["rows"])]
    lines = [
        [
            f"`{row['kind']}`" + ", `--recompute`" * row["recompute"],
            f"{row['batch']:,}",
            f"{row['ms']:,.1f}",
            f"{row['bytes_per_second']:,}",
            f"{row['first_ms'] / 1e3:.1f}",
            f"{row['allocated_bytes'] / MIB:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: (row["kind"] != "tiny", row["batch"]))
    ]
    head = ["preset", "batch", "ms", "bytes/s", "first step, s", "peak, MiB"]
    return measured(head, lines, used)


EDGELESS = "held_out_nats_without_edges"
"""Field of the loss without edges, which variants without a graph do not have."""


def ablation(runs: Runs) -> str:
    """Held-out losses of variants of `arb-tiny` in the same time, by seed."""
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows_of(runs)):
        rows = sorted(rows_of(runs, variant=variant), key=lambda row: row["seed"])
        losses = [row["held_out_nats"] for row in rows]
        without = [row[EDGELESS] for row in rows if row.get(EDGELESS) is not None]
        lines.append(
            [
                f"`{variant}`",
                f"{rows[0]['ms']:.2f}",
                f"{rows[0]['steps']:,}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{mean(losses):.4f}",
                f"{mean(without):.4f}" if len(without) == len(rows) else "",
            ]
        )
    head = ["parts", "ms", "steps", "nats by seed", "mean", "mean without edges"]
    return measured(head, lines, runs)


TABLES: Tables = {
    "gates": ("streams", gates),
    "batches": ("arb_3b", batches),
    "ablation": ("ablation", ablation),
}

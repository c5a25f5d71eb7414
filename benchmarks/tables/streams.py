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


TABLES: Tables = {
    "streams": ("streams", streams),
    "gates": ("streams", gates),
}

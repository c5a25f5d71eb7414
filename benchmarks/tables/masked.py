"""Tables of `docs/masked.md`."""

from benchmarks.tables.cells import measured, number
from benchmarks.tables.rows import Runs, Tables, row_of, rows_of


def holes(runs: Runs) -> str:
    """Losses in holes, and by how much they exceed those of the model of the next byte."""
    kinds = {"fill": "fill", "masked": "masked", "masked from left to right": "masked"}
    lines = []
    for size in sorted({row["hole"] for row in rows_of(runs)}):
        for kind, name in kinds.items():
            row = row_of(runs, run=name, hole=size)
            if row:
                losses = row["nats_per_byte"]
                without = losses.get(f"{kind} without the right side")
                error = row.get("standard_error", {}).get(kind)
                lines.append(
                    [
                        str(size),
                        kind,
                        f"{losses[kind]:.4f}",
                        number(without, ".4f"),
                        f"{losses['next']:.4f}",
                        f"{losses[kind] - losses['next']:+.4f}"
                        + (f" ± {error:.4f}" if error else ""),
                    ]
                )
    head = [
        "hole, bytes", "objective", "both sides", "left side alone", "`next`, left side",
        "both sides less `next`",
    ]  # fmt: skip
    return measured(head, lines, runs)


TABLES: Tables = {
    "holes": ("holes", holes),
}

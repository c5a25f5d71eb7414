"""Tables of `docs/masked.md`."""

from benchmarks.tables.cells import measured, number
from benchmarks.tables.rows import Runs, Tables, rows_of

WITHOUT_RIGHT = " without the right side"
"""End of a name of a loss, in rows of `benchmarks.holes`, whose model read the left side only."""


def holes(runs: Runs) -> str:
    """Losses in holes, and by how much they exceed those of the model of the next byte."""
    lines = []
    for row in sorted(rows_of(runs), key=lambda row: (row["hole"], row["run"])):
        losses = row["nats_per_byte"]
        for way, loss in losses.items():
            if way == "next" or way.endswith(WITHOUT_RIGHT):
                continue
            error = row.get("standard_error", {}).get(way)
            order = way.removeprefix(way.split()[0])  # "" or " from left to right"
            lines.append(
                [
                    str(row["hole"]),
                    row["run"] + order,
                    number(row["steps"]["run"] if "steps" in row else None),
                    f"{loss:.4f}",
                    number(losses.get(way + WITHOUT_RIGHT), ".4f"),
                    f"{losses['next']:.4f}",
                    f"{loss - losses['next']:+.4f}" + (f" ± {error:.4f}" if error else ""),
                ]
            )
    head = [
        "hole, bytes", "run", "steps", "both sides", "left side alone", "`next`, left side",
        "both sides less `next`",
    ]  # fmt: skip
    return measured(head, lines, runs)


TABLES: Tables = {
    "holes": ("holes", holes),
}

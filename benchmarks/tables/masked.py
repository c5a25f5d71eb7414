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


def filled(runs: Runs) -> str:
    """Shares of bytes that are those of the text, if the likeliest are chosen."""
    lines = []
    for row in sorted(rows_of(runs), key=lambda row: (row["hole"], row["run"])):
        for way, found in row.get("right", {}).items():
            passes = int(way.split()[1]) if " pass" in way else row["hole"]
            kind = way.split(",")[0]
            name = f"`next` of {row['run']}" if kind == "next" else row["run"]
            lines.append([str(row["hole"]), name, str(passes), f"{100 * found:.1f} %"])
    head = ["hole, bytes", "run", "passes", "bytes that are those of the text"]
    return measured(head, lines, [run for run in runs if any("right" in r for r in run["rows"])])


TABLES: Tables = {
    "holes": ("holes", holes),
}

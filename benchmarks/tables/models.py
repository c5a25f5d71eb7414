"""Tables of `docs/models.md`."""

from statistics import mean

from benchmarks.tables.cells import measured
from benchmarks.tables.rows import Row, Runs, Tables, rows_of


def checked_texts(runs: Runs) -> str:
    """Speed of texts of trained models by checks, with the largest bonus of a repetition."""
    ways = rows_of(runs)
    unchecked = {(row["preset"], row["way"]): row for row in ways if row["size"] == 1}
    best: dict[tuple, Row] = {}
    for row in sorted((row for row in ways if row["size"] > 1), key=lambda row: row["favour"] or 0):
        best[tuple(row[name] for name in ("preset", "way", "size", "has_head"))] = row
    names = {"small-ahead": "`small`", "base-ahead": "`base`"}
    names |= {"1b-ahead2": "`1b`"}
    lines = []
    order = [*names, *(key[0] for key in best)]
    for key in sorted(best, key=lambda key: (order.index(key[0]), key)):
        row, (name, way, size, has_head) = best[key], key
        lines.append(
            [
                names.get(name, f"`{name}`"),
                way,
                str(size),
                f"head, {row['favour']:g}" if has_head else "text alone",
                _speeds(unchecked[name, way]),
                _speeds(row),
                f"{mean(row['bytes_per_check']):.2f}",
                f"{row['times']:.2f}",
                "yes" if row["same"] else "**no**",
            ]
        )
    head = [
        "model", "sampling", "`--ahead`", "proposals", "bytes/s without", "with", "bytes a check",
        "times as fast", "same text",
    ]  # fmt: skip
    return measured(head, lines, runs)


def _speeds(row: Row) -> str:
    low, high = min(row["bytes_per_second"]), max(row["bytes_per_second"])
    return f"{low:,} to {high:,}"


TABLES: Tables = {
    "checked-texts": ("checked_texts", checked_texts),
}

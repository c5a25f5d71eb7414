"""Tables of `docs/rules.md`."""

from benchmarks.tables.cells import MIB, measured
from benchmarks.tables.rows import Runs, Tables, rows_of


def signs(runs: Runs) -> str:
    """Time and memory of a step of `votes`, whose gradients are stored as signs or as floats."""
    rows = [row for row in rows_of(runs) if row["kind"].startswith("votes")]
    used = [run for run in runs if any(row in rows for row in run["rows"])]
    lines = [
        [
            row["kind"].removeprefix("votes, "),
            f"{row['batch']}" + ", `--recompute`" * row["recompute"],
            f"{row['ms']:,.1f}",
            f"{row['bytes_per_second']:,}",
            f"{row['allocated_bytes'] / MIB:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: (row["batch"], row["kind"]))
    ]
    return measured(["gradients", "batch", "ms", "bytes/s", "peak, MiB"], lines, used)


TABLES: Tables = {
    "signs": ("arb_3b", signs),
}

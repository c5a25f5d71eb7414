"""Tables of `docs/export.md`."""

from benchmarks.tables.cells import markdown, source
from benchmarks.tables.rows import Runs, Tables, rows_of


def exports(runs: Runs) -> str:
    """Compare what other programs make of an export with what `arb` computes."""
    head = ["model", "program", "type", "bytes a weight", "from arb", "from float64"]
    head += ["first divergence"]
    rows = []
    for row in rows_of(runs):
        first, is_export = row.get("first_divergence"), "bytes" in row
        rows.append(
            [
                f"`{row['model']}`",
                row["program"],
                row["type"],
                f"{row['bytes'] / row['num_weights']:.3f}" if is_export else "",
                f"{row['largest']:.1e}" if row["largest"] else "",
                f"{row['from_float64']:.1e}",
                ("none" if first is None else f"byte {first}") if is_export else "",
            ]
        )
    return markdown(head, rows) + source(runs)


TABLES: Tables = {
    "exports": ("exports", exports),
}

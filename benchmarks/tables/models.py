"""Tables of `docs/models.md`."""

from statistics import mean

from benchmarks.tables.cells import MIB, measured, number
from benchmarks.tables.rows import Row, Runs, Tables, row_of, rows_of


def checked_texts(runs: Runs) -> str:
    """Speed of texts of trained models by checks, with the largest bonus of a repetition."""
    ways = [row for row in rows_of(runs) if "bytes_per_check" in row]
    alone = {(row["preset"], row["way"]): row for row in ways if row["size"] == 1}
    kept: dict[tuple, Row] = {}
    for row in sorted((row for row in ways if row["size"] > 1), key=lambda row: row["favour"] or 0):
        kept[tuple(row[name] for name in ("preset", "way", "size", "has_head"))] = row
    names = {"small-ahead": "`small`", "base-ahead": "`base`"}
    names |= {"1b-ahead": "`1b`, 560 steps", "1b-ahead2": "`1b`, 760 steps"}
    lines = []
    order = [*names, *(key[0] for key in kept)]
    for key in sorted(kept, key=lambda key: (order.index(key[0]), key)):
        row, (name, way, size, has_head) = kept[key], key
        lines.append(
            [
                names.get(name, f"`{name}`"),
                way,
                str(size),
                f"head, {row['favour']:g}" if has_head else "text alone",
                _speeds(alone[name, way]),
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


def codebooks(runs: Runs) -> str:
    """Use of codes, step times and losses of vector quantisers and product keys."""
    kinds = {"nearest": "quantiser", "keys": "product keys", "none": "no codebook"}
    shapes = {"shared": "131,072 x 1,024", "knowledge": "5,000,000 x 64"}
    lines = []
    for shape in shapes:
        for kind in kinds:
            row = row_of(runs, shape=shape, kind=kind)
            if row:
                # the first steps are compiled
                (early, begin, _), (late, end, _) = row["told"][0], row["told"][-1]
                used, dead = (
                    f"{100 * row[name]:.3g} %" if name in row else ""
                    for name in ("used_share", "dead_share")
                )
                lines.append(
                    [
                        shapes[shape],
                        kinds[kind],
                        f"{1000 * (end - begin) / (late - early):.2f}",
                        f"{row['val_loss']:.4f}",
                        used,
                        number(row.get("perplexity"), ",.0f"),
                        dead,
                        f"{row['state_bytes'] / MIB:,.0f}",
                    ]
                )
    head = [
        "rows", "kind", "ms per step", "held-out nats per byte", "used", "perplexity", "dead",
        "state, MiB",
    ]  # fmt: skip
    return measured(head, lines, runs)


TABLES: Tables = {
    "codebooks": ("codes", codebooks),
    "checked-texts": ("checked_texts", checked_texts),
}

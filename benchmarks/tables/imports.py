"""Tables of `docs/import.md`."""

from statistics import mean
from typing import Any

from benchmarks.tables.cells import markdown, measured, number, share, source
from benchmarks.tables.rows import Row, Runs, Tables, row_of, rows_of


def large_tuning(runs: Runs) -> str:
    """List what tuning takes at large shapes, and how fast it is."""
    head = ["shape", "kind", "tokens a step", "state"]
    head += ["allocated", "predicted", "reserved", "predicted", "cap", "tokens/s"]
    rows = [
        [
            row["shape"].upper(),
            row["kind"],
            _step(row),
            *(_gib(row[f"{name}_bytes"]) for name in LARGE_BYTES),
            "" if row["cap_gib"] is None else f"{row['cap_gib']} GiB",
            number(row["tokens_per_second"]),
        ]
        for row in rows_of(runs)
    ]
    return markdown(head, rows) + source(runs)


LARGE_BYTES = (
    "state",
    "allocated",
    "predicted_allocated",
    "reserved",
    "predicted_reserved",
)


def _step(row: Row) -> str:
    tokens = f"{row['batch'] * row['accum'] * row['ctx']:,}"
    parts = f" in {row['accum']} micro-batches" if row["accum"] > 1 else ""
    return tokens + parts + (", recomputed" if row["recompute"] else "")


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"


def tuning(runs: Runs) -> str:
    """List each way of tuning at its best rate, the best way first: losses, bytes and speed."""
    tuned = [row for row in rows_of(runs) if row["part"] not in ("begun", "speed")]
    by_way: dict[tuple[str, float], list[Row]] = {}
    for row in tuned:
        by_way.setdefault((row["kind"], row["lr"]), []).append(row)
    best: dict[str, float] = {}
    for kind, lr in sorted(by_way, key=lambda way: mean(row["new"] for row in by_way[way])):
        best.setdefault(kind, lr)
    lines = []
    for kind, lr in best.items():
        speed = row_of(runs, part="speed", kind=kind)
        lines.append(
            [
                kind,
                f"{lr:g}",
                *_seeds(tuned, kind=kind, lr=lr),
                f"{by_way[kind, lr][0]['state_bytes'] / 1e6:.1f}",
                f"{speed['peak_bytes'] / 1e9:.2f}" if speed else "",
                number(speed["bytes_per_second"]) if speed else "",
            ]
        )
    head = ["way", "best rate", "new text", "old text", "state, MB", "peak, GB", "bytes/s"]
    return markdown(head, lines) + source(runs)


def tuning_tokens(runs: Runs) -> str:
    """List ways of tuning a real model at their best rates: means of seeds, by text.

    Rates with fewer seeds than others of a way are left out.
    """
    ways: dict[tuple, dict[float, list[Row]]] = {}
    for row in sorted(rows_of(runs), key=lambda row: row["part"] != "begun"):
        if row["part"] != "begun" or row["kind"] == "float":
            rates = ways.setdefault((row["text"], row["kind"]), {})
            rates.setdefault(row["lr"], []).append(row)
    best = {way: min(rates.values(), key=_by_seeds) for way, rates in ways.items()}
    begun = [way for way in best if way[1] == "float"]
    order = begun + sorted(best.keys() - begun, key=lambda way: _by_seeds(best[way])[1])
    lines = []
    for text, kind in sorted(order, key=lambda way: way[0] != "novels"):
        rows = best[text, kind]
        fields = {"novels": "novels", "code": "old", "chats": "chats", text: "new"}
        cells = [f"{_mean(rows, fields[name]):.4f}" for name in ("novels", "code", "chats")]
        cells += [share(_mean(rows, f"{fields[name]}_choices")) for name in ("novels", "code")]
        size = f"{rows[0]['state_bytes'] / 1e6:.0f}" if rows[0]["state_bytes"] else ""
        tuned = [kind, f"{rows[0]['lr']:g}", f"{len(rows)}"]
        way = ["before", "", ""] if kind == "float" else tuned
        lines.append([text, *way, *cells, size])
    head = ["tuned on", "way", "best rate", "seeds", "novels", "code", "chats"]
    head += ["choices: novels", "code", "state, MB"]
    return markdown(head, lines) + source(runs)


def _mean(rows: list[Row], field: str) -> float:
    return mean(row[field] for row in rows)


def _by_seeds(rows: list[Row]) -> tuple[int, float]:
    """Order rows of one rate by the number of seeds, the most first, then by the loss."""
    return -len(rows), _mean(rows, "new")


MIXTURES = {
    "moment+nibble": "`moment`, MLPs by `nibble`",
    "moment+nibble-blocks": "`moment`, blocks by `nibble`",
}
"""Rules of weights that fade, if there are two of them."""
WAYS_TO_TRITS = {
    "float": "float, before",
    "muon": "straight-through latents, Muon",
    "moment imported": "`moment`, all digits, as imported",
    "moment rounded": "`moment`, rounded without training",
    "nibble rounded": "`nibble`, rounded without training",
}


def ways_to_trits(runs: Runs) -> str:
    """List ways to a ternary model, at their best rates and fades, by the loss of both texts."""
    ways: dict[tuple, list[Row]] = {}
    for row in sorted(rows_of(runs), key=lambda row: row["seed"]):
        if row["kind"] not in WAYS_TO_TRITS and not row["lr"]:
            continue  # imports of other rules hardly differ
        fields = ("kind", "lr", "taught", "fade_from", "fade_to")
        ways.setdefault(tuple(row[field] for field in fields), []).append(row)
    lines, shown = [], set()
    for rows in sorted(ways.values(), key=lambda rows: mean(r["new"] + r["old"] for r in rows)):
        row = rows[0]
        if (row["kind"], row["taught"]) in shown:
            continue
        shown.add((row["kind"], row["taught"]))
        fades = row["kind"] not in WAYS_TO_TRITS
        peaks = sorted({each.get("peak_bytes") or 0 for each in rows} - {0})
        way = (MIXTURES | WAYS_TO_TRITS).get(row["kind"], f"`{row['kind']}`")
        lines.append(
            [
                way + (", taught" if row["taught"] else ""),
                f"{row['fade_from']:.0%} to {row['fade_to']:.0%}" if fades else "",
                f"{row['lr']:g}" if row["lr"] else "",
                *(", ".join(f"{each[text]:.4f}" for each in rows) for text in ("new", "old")),
                f"{row['state_bytes'] / 1e6:.0f}" if row["state_bytes"] else "",
                ", ".join(f"{peak / 1e6:,.0f}" for peak in peaks),
            ]
        )
    head = ["way", "weights fade", "rate", "novels", "code", "state, MB", "peak, MB"]
    if not any(line[-1] for line in lines):  # earlier rows have none
        head, lines = head[:-1], [line[:-1] for line in lines]
    return measured(head, lines, runs)


def _seeds(rows: list[Row], **fields: Any) -> list[str]:
    """List new and old losses of all seeds."""
    some = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    some.sort(key=lambda row: row["seed"])
    return [", ".join(f"{row[name]:.4f}" for row in some) for name in ("new", "old")]


TABLES: Tables = {
    "large-tuning": ("large_tuning", large_tuning),
    "tuning": ("tuning", tuning),
    "tuning-tokens": ("tuning_tokens", tuning_tokens),
    "ternary-tuning": ("ternary_tuning", ways_to_trits),
    "ternary-tuning-tokens": ("ternary_tuning_tokens", ways_to_trits),
}

"""Tables of `docs/long.md`."""

from benchmarks.tables.cells import MIB, measured
from benchmarks.tables.rows import Runs, Tables, only, rows_of


def long_speed(runs: Runs) -> str:
    """Training, text and cache of compressed attention against dense, at ctx 16,384."""
    lines = []
    for row in rows_of(runs):
        made = row["texts"].values()
        lines.append(
            [
                row["kind"],
                f"{row['weights'] / 1e6:.1f} M",
                f"{row['bytes_per_second']:,}",
                " / ".join(f"{text['generated_bytes_per_second']:,.0f}" for text in made),
                " / ".join(f"{text['cache_bytes'] / MIB:.1f}" for text in made),
            ]
        )
    kept = " / ".join(next(iter(rows_of(runs)), {"texts": {}})["texts"])
    head = ["attention", "weights", "trained bytes/s", f"text, bytes/s: {kept}", "cache, MiB"]
    return measured(head, lines, runs)


def long_options(runs: Runs) -> str:
    """Held-out loss of options after ten seconds, by seed."""
    lines, runs = [], only(runs, seconds=10)
    for kind in dict.fromkeys(row["kind"] for row in rows_of(runs)):
        first, *others = rows_of(runs, kind=kind)
        nats = ", ".join(f"{row['nats']:.4f}" for row in (first, *others))
        size = f"{first['weights'] / 1e6:,.1f} M"
        lines.append([kind, size, f"{first['ms']:.1f}", f"{first['steps']:,}", nats])
    return measured(["option", "weights", "ms", "steps", "nats by seed"], lines, runs)


def long_quality(runs: Runs) -> str:
    """Held-out loss after equal time at ctx 16,384, by position, and with a cache in eight bits."""
    lines, starts, runs = [], [], only(runs, seconds=60)
    for row in rows_of(runs):
        kept = row["kept_in"]
        starts = [f"from {first:,}" for first, *_ in row["by_position"]]
        more = [
            f"{kept[kv]['nats'] - kept['bf16']['nats']:+.5f}" if kv in kept else ""
            for kv in ("int8", "fp8")
        ]
        lines.append(
            [
                row["kind"],
                f"{row['weights'] / 1e6:.1f} M",
                f"{row['seconds']:g}",
                f"{row['steps']:,}",
                f"{row['trained_bytes'] / 1e6:.1f}",
                f"{row['nats']:.4f}",
                *(f"{nats:.4f}" for *_, nats in row["by_position"]),
                *more,
                f"{kept['bf16']['cache_bytes'] / MIB:.1f}",
            ]
        )
    head = ["attention", "weights", "seconds", "steps", "MB read", "nats", *starts]
    return measured([*head, "`int8`", "`fp8`", "cache, MiB"], lines, runs)


TABLES: Tables = {
    "long-speed": ("long", long_speed),
    "long-quality": ("long_quality", long_quality),
    "long-options": ("long_quality", long_options),
}

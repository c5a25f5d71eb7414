"""Tables of `docs/deep.md`."""

from benchmarks.tables.cells import measured
from benchmarks.tables.rows import Runs, Tables, rows_of


def deep(runs: Runs) -> str:
    """Measurements of a model of many blocks, a line each."""
    rows = {(row["part"], row["variant"]): row for row in rows_of(runs)}
    if not rows:
        return measured([], [], [])
    steps, seen = rows["train", ""], rows["causality", ""]
    losses = ", ".join(f"{loss:.2f}" for loss in steps["losses"])
    rms = seen["residual_rms"]
    moved = sum(seen["acausal_positions_by_layer"])
    lines = [
        ["weights", f"{steps['weights'] / 1e6:,.1f} M"],
        [f"loss in {len(steps['losses'])} steps, nats a byte", losses],
        ["peak, predicted", f"{steps['predicted_peak_bytes']:,} bytes"],
        ["peak, measured", f"{steps['peak_bytes']:,} bytes"],
        ["a step, not captured", f"{steps['seconds_a_step']:.2f} s"],
        ["positions that a later byte moves, of all blocks", f"{moved}"],
        ["residual stream after the embedding, after each tenth block, and last",
         ", ".join(f"{value:.2f}" for value in [*rms[::10], rms[-1]])],
    ]  # fmt: skip
    for (part, variant), row in rows.items():
        if part == "cosines":
            least = f"1 - {1 - row['least_cosine']:.0e}"
            lines.append([f"least cosine of a block's attention, after {variant}", least])
        if part == "text":
            size = f"{row['cache_bytes'] / 2**20:.2f} MiB"
            lines.append([f"cache of 700 bytes in {variant}", size])
        if part == "indexer":
            what = f"choices of eight bits that float32 shares, {row['chosen']} of {variant}"
            alone = f"{row['shared']:.1%}, of queries alone {row['shared_by_queries']:.1%}"
            lines.append([what, alone.replace("%", " %")])
    return measured(["`arb-deep`", "measured"], lines, runs)


TABLES: Tables = {
    "deep": ("deep", deep),
}

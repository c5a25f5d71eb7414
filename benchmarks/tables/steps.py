"""Training steps of the presets, compared with those of the float baselines."""

from statistics import median

from benchmarks.tables.rows import Row, Runs, row_of

PRESETS = ("tiny", "small", "base", "1b")


def speed_ratio(runs: Runs, ours: Row | None, peer: Row | None) -> float | None:
    """Return our relative speed: the median over rounds in turns, or between runs of medians."""
    if not ours or not peer:
        return None
    are_of_one_run = any(ours in run["rows"] and peer in run["rows"] for run in runs)
    if are_of_one_run and ours.get("in_turns") and peer.get("in_turns"):
        pairs = zip(ours["rounds_ms"], peer["rounds_ms"], strict=True)
        return median(theirs / mine for mine, theirs in pairs)
    return peer["ms"] / ours["ms"]


def faster(runs: Runs, preset: str, twin: str) -> Row | None:
    """Return the fastest of the baselines: with sub-norms, without, and bare."""
    ways = ("", ", no sub-norms", ", bare")
    found = [row_of(runs, preset=preset, kind=f"{twin}{how}") for how in ways]
    return min((row for row in found if row), key=lambda row: row["ms"], default=None)

"""Training steps of the presets, compared with those of the float baselines."""

from statistics import median

from benchmarks.tables.rows import Row, Runs, row_of

PRESETS = ("tiny", "small", "base", "1b")


def gpu_of(runs: Runs, row: Row) -> str:
    """Return the name of the GPU that a row was measured on."""
    return next(run["hardware"]["gpu"] for run in runs if row in run["rows"])


def speed_ratio(runs: Runs, ours: Row | None, peer: Row | None) -> float | None:
    """Return our relative speed: the median over rounds in turns, or between runs of medians.

    None for another GPU.
    """
    if not ours or not peer or gpu_of(runs, ours) != gpu_of(runs, peer):
        return None
    are_of_one_run = any(ours in run["rows"] and peer in run["rows"] for run in runs)
    if are_of_one_run and ours.get("in_turns") and peer.get("in_turns"):
        pairs = zip(ours["rounds_ms"], peer["rounds_ms"], strict=True)
        return median(theirs / mine for mine, theirs in pairs)
    return peer["ms"] / ours["ms"]


def faster(runs: Runs, ours: Row | None, twin: str) -> Row | None:
    """Return the fastest baseline on the same GPU: with sub-norms, without, or bare."""
    if not ours:
        return None
    ways = ("", ", no sub-norms", ", bare")
    twins = [row_of(runs, preset=ours["preset"], kind=f"{twin}{how}") for how in ways]
    gpu = gpu_of(runs, ours)
    known = [row for row in twins if row and gpu_of(runs, row) == gpu]
    return min(known, key=lambda row: row["ms"], default=None)

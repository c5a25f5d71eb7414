"""Tables of `docs/media.md`."""

from benchmarks.tables.cells import measured
from benchmarks.tables.rows import Runs, Tables, rows_of


def heard(runs: Runs) -> str:
    """Bits that sounds save after their own text."""
    names = {"words-again.txt": "heard, in another reading", "words-val.txt": "not heard"}
    lines = [
        [
            row["run"],
            names.get(row["text"], row["text"]),
            str(row["sounds"]),
            f"{row['bits_per_sample']:.3f}",
            f"{row['after_others']:.3f}",
            f"{row['bits_saved_per_sound']:.1f} ± {row['standard_error']:.1f}",
            f"{row['own_is_likeliest']:.0%}, {row['by_chance']:.0%}".replace("%", " %"),
        ]
        for row in rows_of(runs)
    ]
    head = [
        "model", "words", "sounds", "bits per sample after its text", "after another's",
        "bits saved per sound", "own text is the likeliest, by chance",
    ]  # fmt: skip
    return measured(head, lines, runs)


TABLES: Tables = {
    "heard": ("heard", heard),
}

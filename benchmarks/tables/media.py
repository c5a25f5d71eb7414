"""Tables of `docs/media.md`."""

from benchmarks.tables.cells import MIB, Columns, measured, number, row_by_row, share
from benchmarks.tables.rows import Runs, Tables, rows_of


def heard(runs: Runs) -> str:
    """Bits that sounds save after their own text."""
    names = {"words-again.txt": "heard, in another reading", "words-val.txt": "not heard"}
    columns: Columns = {
        "model": lambda row: row["run"],
        "words": lambda row: str(names.get(row["text"], row["text"])),
        "sounds": lambda row: str(row["sounds"]),
        "bits per sample after its text": lambda row: f"{row['bits_per_sample']:.3f}",
        "after another's": lambda row: f"{row['after_others']:.3f}",
        "bits saved per sound": lambda row: (
            f"{row['bits_saved_per_sound']:.1f} ± {row['standard_error']:.1f}"
        ),
        "own text is the likeliest, by chance": lambda row: (
            f"{row['own_is_likeliest']:.0%}, {row['by_chance']:.0%}".replace("%", " %")
        ),
    }
    return row_by_row(columns, runs)


def said(runs: Runs) -> str:
    """Shares of words that are recognised by their sound."""
    columns: Columns = {
        "model": lambda row: row["run"],
        "words, times": lambda row: f"{row['words']}, {row['times']}",
        "temperature": lambda row: f"{row['temperature']:g}",
        "complete sounds": lambda row: share(row["complete"]),
        "recognised, said by the model": lambda row: share(row["recognised"]),
        "recognised, said by espeak-ng": lambda row: share(row["recognised_of_espeak"]),
        "by chance": lambda row: f"{row['by_chance']:.1%}".replace("%", " %"),
    }
    return row_by_row(columns, runs)


def media_equal(runs: Runs) -> str:
    """Losses of sounds and pictures after equal times of training."""
    columns: Columns = {
        "text": lambda row: row["text"],
        "weights": lambda row: row["weights"],
        "steps": lambda row: f"{row['steps']:,}",
        "bytes per second, alone": lambda row: f"{row['bytes_per_second']:,.0f}",
        "held-out nats per byte": lambda row: f"{row['val_loss']:.4f}",
        "bits per sample or pixel": lambda row: number(row["bits_per_unit"], ".3f"),
        "state, MiB": lambda row: f"{row['state_bytes'] / MIB:.1f}",
    }
    return row_by_row(columns, runs)


def composite(runs: Runs) -> str:
    """Losses by kind with one head and with the composite head, for each seed."""
    heads = {"plain": "linear", "composite": "composite"}
    lines = []
    for kind, name in heads.items():
        rows = sorted(rows_of(runs, kind=kind), key=lambda row: row["seed"])
        losses = (
            ", ".join(f"{row[part]:.4f}" for row in rows)
            for part in ("text", "sound", "picture", "all")
        )
        lines.append([name, *losses])
    head = ["head", "text", "sounds", "pictures", "all"]
    return measured(head, lines, runs)


TABLES: Tables = {
    "media_equal": ("media_equal", media_equal),
    "heard": ("heard", heard),
    "said": ("said", said),
    "composite": ("composite", composite),
}

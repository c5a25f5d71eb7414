"""Tables of `docs/media.md`."""

from benchmarks.tables.cells import MIB, measured, number, share
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


def said(runs: Runs) -> str:
    """Shares of words that are recognised by their sound."""
    lines = [
        [
            row["run"],
            f"{row['words']}, {row['times']}",
            f"{row['temperature']:g}",
            *(share(row[name]) for name in ("complete", "recognised", "recognised_of_espeak")),
            f"{row['by_chance']:.1%}".replace("%", " %"),
        ]
        for row in rows_of(runs)
    ]
    head = [
        "model", "words, times", "temperature", "complete sounds", "recognised, said by the model",
        "recognised, said by espeak-ng", "by chance",
    ]  # fmt: skip
    return measured(head, lines, runs)


def media_equal(runs: Runs) -> str:
    """Losses of sounds and pictures after equal times of training."""
    lines = [
        [
            row["text"],
            row["weights"],
            f"{row['steps']:,}",
            f"{row['bytes_per_second']:,.0f}",
            f"{row['val_loss']:.4f}",
            number(row["bits_per_unit"], ".3f"),
            f"{row['state_bytes'] / MIB:.1f}",
        ]
        for row in rows_of(runs)
    ]
    head = [
        "text", "weights", "steps", "bytes per second, alone", "held-out nats per byte",
        "bits per sample or pixel", "state, MiB",
    ]  # fmt: skip
    return measured(head, lines, runs)


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

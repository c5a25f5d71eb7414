"""Warnings about the texts of a run, given before it starts."""

from pathlib import Path

from arbcli.data import FAR_NATS, Text, Texts, entropy
from arbcli.media.spans import HEADER

LOOKED_AT_BYTES = 2**13
"""Of each file, from its beginning."""
MOST_FILES = 1000
"""That are looked at."""


def text_warnings(texts: Texts) -> list[str]:
    """Say whether texts have files that are neither text, sound nor picture, or are unlike."""
    both = texts.train.source, texts.val.source
    found = [file for text in both for file in _binary_files(text)]
    warnings = []
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.append(
            f"warning: `{found[0]}`{more} have NUL bytes, so they are probably binary: leave them"
            " out, unless they are meant"
        )
    train, val = map(entropy, both)
    if abs(train - val) > FAR_NATS:
        warnings.append(
            f"warning: the held-out text is unlike the training text: its order-0"
            f" entropy is {val:.2f} nats, and not {train:.2f}; name another with `--val`"
        )
    return warnings


def _binary_files(text: Text) -> list[Path]:
    found, begin = [], 0
    for file, size in list(zip(text.files, text.sizes, strict=True))[:MOST_FILES]:
        beginning = text.read(begin, min(size, LOOKED_AT_BYTES))
        if b"\0" in beginning and not HEADER.search(beginning):
            found.append(file)
        begin += size
    return found

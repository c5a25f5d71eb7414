"""Warnings about the texts of a run before it starts."""

from pathlib import Path

from arbcli.base.lazy import imported
from arbcli.data.text import FAR_NATS, Text, Texts, entropy
from arbcli.families import MEDIA_MARK

LOOKED_AT_BYTES = 2**13
"""Bytes at the beginning of each file that are checked."""
MOST_FILES = 1000
"""Maximum number of files that are checked."""


def text_warnings(texts: Texts) -> list[str]:
    """Return warnings about binary files, and about dissimilar training and held-out texts."""
    both = texts.train.source, texts.val.source
    found = [file for text in both for file in _binary_files(text)]
    warnings = []
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.append(
            f"warning: NUL bytes in `{found[0]}`{more}, which may be binary: leave binary files out"
        )
    train, val = map(entropy, both)
    if abs(train - val) > FAR_NATS:
        warnings.append(
            f"warning: the held-out text differs from the training text: its order-0 entropy is"
            f" {val:.2f} nats, not {train:.2f}; name another with `--val`"
        )
    return warnings


def _beginning(file: Path) -> bytes:
    """Read the beginning of a file, of which a text may have a later part."""
    with file.open("rb") as source:
        return source.read(LOOKED_AT_BYTES)


def _has_media(content: bytes) -> bool:
    """Return whether content has the header of a sound or a picture."""
    if MEDIA_MARK not in content:
        return False
    return imported("arbcli.families.media.spans:HEADER").search(content) is not None


def _binary_files(text: Text) -> list[Path]:
    found, begin = [], 0
    for file, size in list(zip(text.files, text.sizes, strict=True))[:MOST_FILES]:
        beginning = text.read(begin, min(size, LOOKED_AT_BYTES))
        if b"\0" in beginning and not _has_media(beginning + _beginning(file)):
            found.append(file)
        begin += size
    return found

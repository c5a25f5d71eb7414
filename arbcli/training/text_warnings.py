"""Warnings about the texts of a run before it starts."""

import codecs
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

from arbcli.base.lazy import imported
from arbcli.data.text import FAR_NATS, Text, Texts, entropy
from arbcli.families import MEDIA_MARK

if TYPE_CHECKING:
    from arbcli.data.tokens import Tokenizer

CHECKED_BYTES = 2**13
"""Bytes at the beginning of each file that are checked."""
SAMPLE_BYTES = 2**16
"""Bytes at the beginning of a text that are compared with the text of their tokens."""
MAX_FILES = 1000
"""Maximum number of files that are checked."""


def text_warnings(texts: Texts) -> list[str]:
    """Return warnings about binary files, and about dissimilar training and held-out texts."""
    sources = texts.train.source, texts.val.source
    binaries = list(dict.fromkeys(file for text in sources for file in _binary_files(text)))
    warnings = []
    if binaries:
        more = f" and {len(binaries) - 1} more" if len(binaries) > 1 else ""
        warnings.append(
            f"warning: NUL bytes in `{binaries[0]}`{more}, which may be binary or UTF-16: leave"
            " binary files out, and convert others to UTF-8"
        )
    if shared := _shared_files(texts):
        warnings.append(
            f"warning: `{min(shared)}` is both training and held-out text, so the held-out loss"
            " measures text that was learnt; name other files with `--val`"
        )
    if texts.tokenizer is not None and not texts.train.packs:
        sample = sources[0].read(0, min(len(sources[0]), SAMPLE_BYTES))
        warnings += lost_text(sample, texts.tokenizer)
    if cut := texts.train.cut:
        warnings.append(
            f"warning: {cut:,} documents are longer than the context: they are cut to it, or left"
            " out if no answer begins in it; use a larger `--ctx`"
        )
    train, val = map(entropy, sources)
    if abs(train - val) > FAR_NATS:
        warnings.append(
            f"warning: the held-out text differs from the training text: its order-0 entropy is"
            f" {val:.2f} nats, not {train:.2f}; name another with `--val`"
        )
    return warnings


def _shared_files(texts: Texts) -> list[Path]:
    """Return the files of which a part is both training and held-out text, as in a mixture."""
    training_ranges: dict[Path, list[tuple[int, int]]] = {}
    for path, start, stop in texts.train.pieces:
        training_ranges.setdefault(path, []).append((start, stop))
    return [
        path
        for path, start, stop in texts.val.pieces
        if any(begin < stop and start < end for begin, end in training_ranges.get(path, ()))
    ]


def lost_text(sample: bytes, tokenizer: "Tokenizer") -> list[str]:
    """Return warnings about bytes of a text's beginning that are lost in tokens.

    A space at the beginning, and composed characters, may change.

    Args:
        sample: beginning of a text, which may end within a character.
        tokenizer: its tokenizer.
    """
    warnings = []
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(sample)  # without the beginning of a character at the end
    if unread := text.count("\ufffd") - sample.count("\ufffd".encode()):
        warnings.append(
            f"warning: the text is not UTF-8: of its first {len(sample):,} bytes {unread:,} become"
            " U+FFFD in tokens; convert it, or train on bytes without `--tokenizer`"
        )
    round_trip = tokenizer.decode(tokenizer.encode(text.encode()))
    before, after = (unicodedata.normalize("NFC", part).lstrip(" ") for part in (text, round_trip))
    if before != after:
        warnings.append(
            f"warning: the tokenizer loses text: {len(before):,} characters come back from tokens"
            f" as {len(after):,} that differ; losses per byte count bytes that no token represents"
        )
    return warnings


def _read_beginning(file: Path) -> bytes:
    """Read the beginning of a file, of which a text may have a later part."""
    with file.open("rb") as source:
        return source.read(CHECKED_BYTES)


def _has_media(content: bytes) -> bool:
    """Return whether content has the header of a sound or a picture."""
    if MEDIA_MARK not in content:
        return False
    return imported("arbcli.families.media.spans:HEADER").search(content) is not None


def _binary_files(text: Text) -> list[Path]:
    files, begin = [], 0
    for file, size in list(zip(text.files, text.sizes, strict=True))[:MAX_FILES]:
        beginning = text.read(begin, min(size, CHECKED_BYTES))
        if b"\0" in beginning and not _has_media(beginning + _read_beginning(file)):
            files.append(file)
        begin += size
    return files

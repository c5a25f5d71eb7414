"""A sound or picture as a prompt, and the one that a model made as a file."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

from arbcli.base.errors import ArbError
from arbcli.families import MEDIA, medium_of
from arbcli.families.media import pictures, sound
from arbcli.families.media.spans import MAX_HEADER, SoundHeader, find_spans

KEPT = 0.5
"""Share of a sound or picture that is the prompt by default."""


def prompt_and_length(
    content: bytes, keep: float | None, length: int | None, kinds: Collection[str] = MEDIA
) -> tuple[bytes, int | None]:
    """Cut a file's bytes to the prompt, and find how many bytes complete it.

    A sound or picture is cut at a whole frame or row. With `length`, the header of a sound has the
    new number of frames.

    Args:
        content: bytes of a file; a text is not cut.
        keep: share of the sound or picture, 0 to 1; None is `KEPT`.
        length: number of bytes to generate; None is the rest of the sound or picture.
        kinds: kinds of media that can be continued; without any, `keep` is 1 and text follows.

    Returns:
        The prompt, and the number of bytes to generate; None for text without `length`.

    Raises:
        ArbError: `keep` is given for a text, leaves nothing to generate, or is not 1 before text;
            or a sound or picture is of another kind.
    """
    span = next(find_spans(content), None)
    if span is None or span.start:
        if keep is not None:
            raise ArbError(
                "`--keep` only applies to a sound or a picture", "leave it out for a text"
            )
        return content, length
    header = span.header
    if not kinds and keep == 1:
        return content, length
    if kinds and header.kind not in kinds:
        raise ArbError(
            f"the prompt is a {header.kind}, and `--out` is a {' or '.join(kinds)}",
            f"choose a name that ends in {', '.join(MEDIA[header.kind])}",
        )
    if not kinds:
        raise ArbError(
            f"the prompt is a {header.kind}, and its continuation needs a file",
            "add `--out FILE`, or `--keep 1` to generate the text after it",
        )
    kept_items = int((KEPT if keep is None else keep) * (header.body_bytes // header.item_bytes))
    missing_bytes = header.body_bytes - kept_items * header.item_bytes
    if isinstance(header, SoundHeader) and length is not None:
        header = dataclasses.replace(header, frames=kept_items + length // header.item_bytes)
        missing_bytes = length
    if not missing_bytes:
        raise ArbError(
            "the whole file is the prompt, and nothing is left to generate",
            "use a smaller `--keep`, give a sound a `--length`, or leave out `--out` and"
            " `--bytes` to generate text",
        )
    body = content[span.body : span.body + kept_items * header.item_bytes]
    return header.encode() + body, missing_bytes if length is None else min(length, missing_bytes)


class Completion:
    """Detects the end of the first sound or picture of a text while the text is generated.

    Args:
        path: path of the file to write; its suffix selects a sound or picture.
    """

    def __init__(self, path: Path) -> None:
        self._kind, self._searched = medium_of(path.name), 0

    def is_complete(self, content: bytes | bytearray) -> bool:
        """Return whether a text, which the last call's text begins, has all of it."""
        for span in find_spans(content, self._searched):
            if span.header.kind == self._kind:
                self._searched = span.start
                return span.stop <= len(content)
            self._searched = span.stop
        self._searched = max(self._searched, len(content) - MAX_HEADER)
        return False


def write_first(path: Path, content: bytes) -> str:
    """Write the first sound or picture of some bytes to a file.

    Args:
        path: path of the file; its suffix selects a sound or picture, and the format.
        content: bytes that a model generated.

    Returns:
        A description of what was written, and how much of it the model generated.

    Raises:
        ArbError: the bytes have none, or the file cannot be written.
    """
    kind = medium_of(path.name)
    span = next((span for span in find_spans(content) if span.header.kind == kind), None)
    if span is None:
        raise ArbError(
            f"the model wrote no {kind}, so `{path}` was not written",
            f"prompt it with the beginning of a {kind}, or train it on some",
        )
    body = content[span.body : span.stop]
    header = span.header
    if isinstance(header, SoundHeader):
        sound.write_sound(path, body, header)
        seconds = len(body) // header.item_bytes / header.rate
        return f"{seconds:.2f} of {header.frames / header.rate:.2f} s"
    pictures.write_picture(path, body, header)
    return f"{len(body) // header.item_bytes} of {header.height} rows of {header.width} pixels"

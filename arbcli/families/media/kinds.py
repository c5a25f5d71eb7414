"""The kinds of media, by the names of files."""

from arbcli.families.media import pictures, sound

SUFFIXES_OF = {"sound": sound.SUFFIXES, "picture": pictures.SUFFIXES}
"""Suffixes of the files of each medium."""


def medium_of(name: str) -> str | None:
    """Return `sound` or `picture` by the suffix of a file's name; None for other files."""
    return next((kind for kind, ends in SUFFIXES_OF.items() if name.lower().endswith(ends)), None)

"""Refuse a place to write to before any work begins, rather than after it."""

import os
from pathlib import Path

from arbcli.errors import ArbError

PICTURES = (".png", ".pdf", ".svg")


def check_file(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that cannot be written, or whose name is not of its kind.

    The suffix keeps a text or a checkpoint from being written over by a picture.

    Raises:
        ArbError: it is refused.
    """
    hint = f"choose another `{option}`"
    if path.suffix.lower() not in suffixes:
        raise ArbError(
            f"`{option}` is `{path}`", hint=f"choose a name that ends in {', '.join(suffixes)}"
        )
    if path.is_dir():
        raise ArbError(f"cannot write `{path}`: it is a folder", hint=hint)
    if not path.parent.is_dir():
        raise ArbError(f"cannot write `{path}`: there is not a folder `{path.parent}`", hint=hint)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArbError(f"cannot write `{path}`: Permission denied", hint=hint)


def check_folder(path: Path, option: str) -> None:
    """Refuse a folder that cannot be made or written to.

    Raises:
        ArbError: it is refused.
    """
    hint = f"choose another `{option}`"
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ArbError(f"cannot write `{path}`: `{there}` is not a folder", hint=hint)
    if not os.access(there, os.W_OK):
        raise ArbError(f"cannot write `{path}`: Permission denied", hint=hint)

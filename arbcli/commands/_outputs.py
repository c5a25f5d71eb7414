"""Checks of output paths, made before any work begins."""

import os
from pathlib import Path

from arbcli.base.errors import ArbError

PICTURES = (".png", ".pdf", ".svg")


def check_file(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    """Check that a file can be written and has one of the suffixes.

    The suffix prevents a plot from overwriting a text or a checkpoint.

    Raises:
        ArbError: the suffix is wrong, or the file cannot be written.
    """
    hint = f"choose another `{option}`"
    if path.suffix.lower() not in suffixes:
        raise ArbError(
            f"`{option}` is `{path}`", f"choose a name that ends in {', '.join(suffixes)}"
        )
    if path.is_dir():
        raise ArbError(f"cannot write `{path}`: it is a folder", hint)
    if not path.parent.is_dir():
        raise ArbError(f"cannot write `{path}`: there is no folder `{path.parent}`", hint)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArbError(f"cannot write `{path}`: Permission denied", hint)


def check_folder(path: Path, option: str) -> None:
    """Check that a folder can be created or written to.

    Raises:
        ArbError: a parent is not a folder, or permission is denied.
    """
    hint = f"choose another `{option}`"
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ArbError(f"cannot write `{path}`: `{existing}` is not a folder", hint)
    if not os.access(existing, os.W_OK):
        raise ArbError(f"cannot write `{path}`: Permission denied", hint)

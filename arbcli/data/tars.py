"""Members of tar files as WebDataset writes them: `.txt` and `.json` files, by key.

Nothing is extracted to the disk, and no link is followed.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError, library_errors
from arbcli.base.reading import DAMAGED

MEMBER_BYTES = 2**24
"""Maximum size of a member in bytes."""
OTHER_MEMBERS = "write its texts as regular files into the archive"


def members(plain: Path, path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the members with a suffix, in the order of their keys.

    The key of a member is its path up to the first dot of its name. Hidden members are left out.

    Args:
        plain: the archive, not compressed.
        path: path for errors.
        suffix: suffix of the members.

    Raises:
        ArbError: the archive is damaged, or a member is a link or too large, or there is none.
    """
    with (
        library_errors(f"`{path}` cannot be read", DAMAGED),
        plain.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        members = sorted(_members(archive, path, suffix))
        if not members:
            raise ArbError(
                f"`{path}` has no members that end in {suffix}",
                "without `--field` the .txt members are read, with it a field of the .json members",
            )
        for _, name, start, size in members:
            file.seek(start)
            content = file.read(size)
            if len(content) < size:
                raise tarfile.ReadError(f"{name} is not complete")
            yield name, content


def _members(archive: Any, path: Path, suffix: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, name, offset and size of the members with a suffix."""
    before = -1
    while (member := archive.next()) is not None:
        archive.members.clear()  # would hold all of them
        if archive.offset <= before:
            raise tarfile.ReadError("a member begins before the one before it")
        before = archive.offset
        folder, _, file_name = member.name.rpartition("/")
        if file_name.startswith(".") or not file_name.lower().endswith(suffix) or member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise ArbError(f"`{member.name}` in `{path}` is not a regular file", OTHER_MEMBERS)
        if member.size < 0:
            raise tarfile.ReadError("a member has a negative size")
        if member.size > MEMBER_BYTES:
            raise ArbError(
                f"`{member.name}` in `{path}` has more than {MEMBER_BYTES:,} bytes",
                "split it, or save its text as a plain file",
            )
        key = f"{folder}/{file_name.partition('.')[0]}"
        yield key, member.name, member.offset_data, member.size

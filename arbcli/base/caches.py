"""The user's cache of generated files, which are verified before they are read.

A digest is stored next to each file. A file is used if it matches its digest and if only this user
or root can have written it: a cache may be shared, and libraries in it are executed.
"""

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path

from arbcli.base.atomic_files import OPEN_FLAGS, replace_file, sweep
from arbcli.base.errors import os_errors

_HINT = "free some space there, or set `XDG_CACHE_HOME` to a folder that you own"


def cache_folder() -> Path:
    """Return the folder of the cache: `arb` in `XDG_CACHE_HOME`, or in `~/.cache`.

    Users without a home, as in containers, have `arb-UID` in the directory for temporary files.
    """
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not parent.startswith("~"):
        return Path(parent) / "arb"
    user = f"-{os.geteuid()}" if hasattr(os, "geteuid") else ""
    return Path(tempfile.gettempdir()) / f"arb{user}"


def private_folder(name: str) -> Path | None:
    """Create a folder in the cache that only this user or root can write; None if that fails."""
    try:
        folder = cache_folder().absolute() / name
        for directory in (folder.parent, folder):
            _make_private(directory)
            if not _is_private(directory.stat()):  # root can change modes of others' folders
                return None
    except OSError:
        return None
    return folder


def is_cached(path: Path) -> bool:
    """Return whether a file that `write_cached` wrote exists and is intact."""
    with suppress(OSError), _open_safe(path) as file, _open_safe(_digest_path(path)) as digest:
        expected = digest.read(2 * sha256().digest_size)
        return file_digest(file, "sha256").hexdigest().encode() == expected
    return False


def read_cached(path: Path) -> bytes | None:
    """Read a file that `write_cached` wrote; None if it is missing or not intact."""
    with suppress(OSError), _open_safe(path) as file, _open_safe(_digest_path(path)) as digest:
        content = file.read()
        if sha256(content).hexdigest().encode() == digest.read(2 * sha256().digest_size):
            return content
    return None


def write_cached(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file and its digest atomically: other processes see the complete file or none.

    Args:
        path: path in `cache_folder()` or a folder in it, which are created if missing.
        blocks: content of the file. If the iterator raises an OSError, it is reported as a failure
            of the cache.

    Raises:
        ArbError: the cache cannot be written, or other users can write to it.
    """
    digest = sha256()

    def hash_blocks() -> Iterator[bytes]:
        for block in blocks:
            digest.update(block)
            yield block

    with os_errors("write to the cache", path.parent, _HINT):
        for folder in dict.fromkeys((cache_folder(), path.parent)):
            _make_private(folder)
        sweep(path.parent)
        # private whatever the umask is: see `_is_private`
        replace_file(path, lambda file: file.writelines(hash_blocks()), 0o600)
        hexadecimal = digest.hexdigest().encode()
        replace_file(_digest_path(path), lambda file: file.write(hexadecimal), 0o600)


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _open_safe(path: Path) -> BufferedReader:
    """Open a regular file that only this user or root can have written.

    Raises:
        OSError: the file is missing, not regular, or writable by other users.
    """
    flags = os.O_RDONLY | OPEN_FLAGS | getattr(os, "O_NONBLOCK", 0)  # a FIFO would block
    file = os.fdopen(os.open(path, flags), "rb")
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and _is_private(status) and _is_private(path.parent.stat()):
        return file
    file.close()
    raise PermissionError("it is not a file to which only this user can write")


def _is_private(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):  # on Windows, modes do not describe other users' rights
        return True
    return _is_owned(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_owned(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can write, or remove the permissions of others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() and not _is_owned(folder.lstat()):
        raise PermissionError("it is a link of another user")
    if not _is_private(folder.stat()):
        folder.chmod(0o700)  # raises PermissionError if another user owns the folder

"""Atomic writes of files, also in folders that other users can write.

Every file that `arb` writes is written here, except for those in private folders. A file is written
under a temporary name, synced and renamed. The temporary file is created exclusively, so it is
never an existing file or a link. A link at the final name is replaced, not followed. Temporary
files of killed processes are recognised by their lock, which is released with the process, and are
removed by `sweep` or when the same file is written again.
"""

import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO

from arbcli.base.errors import ArbError, os_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WRITE_HINT = "check permissions and free space; whatever was saved before is intact"
OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags for files in folders that other users can write: links are not followed."""
_RANDOM_BYTES = 4
TEMPORARY = f"{'[0-9a-f]' * (2 * _RANDOM_BYTES)}.tmp"
"""Pattern of the end of a temporary file's name, after `.NAME.`."""


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, with sorted keys and without NaN.

    Raises:
        ArbError: it cannot be written; an existing file is intact.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text atomically, as UTF-8.

    Raises:
        ArbError: it cannot be written; an existing file is intact.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes atomically.

    Raises:
        ArbError: it cannot be written; an existing file is intact.
    """
    write_file(path, lambda file: file.write(content))


def write_file(
    path: Path, write: Callable[[BufferedWriter], object], hint: str = WRITE_HINT
) -> None:
    """Write a file atomically.

    Args:
        path: path of the file.
        write: writes the contents to an open file.
        hint: hint of the error.

    Raises:
        ArbError: it cannot be written, or is a device or a folder; an existing file is intact.
    """
    with os_errors("write", path, hint):
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise OSError("it is not a regular file")
        replace_file(path, write)


def replace_file(path: Path, write: Callable[[BufferedWriter], object], mode: int = 0o666) -> None:
    """Write a file atomically, like `write_file`, and pass on errors of the operating system.

    Args:
        path: path of the file; a link is replaced.
        write: writes the contents to an open file.
        mode: permissions of the file, without those that the umask denies.

    Raises:
        OSError: it cannot be written; an existing file is intact.
    """
    sweep(path.parent, glob.escape(path.name))
    temporary, descriptor = _create(path, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                temporary.replace(path)  # under the lock, so that no other process sweeps it
        if fcntl is None:
            temporary.replace(path)  # Windows cannot rename an open file
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Write a folder atomically: yield a temporary one, which gets its name after the block.

    Raises:
        OSError: it cannot be written, or `path` is a file or a folder that is not empty.
    """
    sweep(path.parent, glob.escape(path.name))
    temporary = _temporary(path)
    temporary.mkdir()
    lock = _lock(temporary)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)
    _sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder of a run, unless it exists.

    Raises:
        ArbError: it cannot be created, or is a link, which may lead out of the run.
    """
    with os_errors("make", path, "choose another `--out`"):
        refuse_link(path)
        path.mkdir(parents=True, exist_ok=True)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to append to it, and create it if it is missing; a link is not followed.

    Raises:
        ArbError: it is a link.
        OSError: it cannot be opened, or is not a regular file.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | OPEN_FLAGS | getattr(os, "O_NONBLOCK", 0), 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError("it is not a regular file")
        return descriptor

    refuse_link(path)
    return open(path, "ab", opener=opener)


def sweep(folder: Path, pattern: str = "*") -> None:
    """Remove temporary files and folders that killed processes left, as far as possible.

    Args:
        folder: folder with the temporary files.
        pattern: pattern of the final names.
    """
    for path in folder.glob(f".{pattern}.{TEMPORARY}"):
        with suppress(OSError):
            if path.is_symlink():
                path.unlink()
            elif (lock := _lock(path)) is not None:
                try:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                finally:
                    os.close(lock)


def is_abandoned(path: Path) -> bool:
    """Return whether the writer of a temporary file has ended, so that `sweep` removes it."""
    if path.is_symlink():
        return True
    with suppress(OSError):  # removed in the meantime
        if (lock := _lock(path)) is not None:
            os.close(lock)
            return True
    return False


def refuse_link(path: Path) -> None:
    """Refuse to write through a link.

    Raises:
        ArbError: the path is a link.
    """
    if path.is_symlink():
        raise ArbError(
            f"`{path}` is a link, and links are not followed for writing",
            "replace it by the file or folder that it names, or choose another directory",
        )


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp")


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """Create a locked temporary file next to `path`; return its path and descriptor."""
    while True:
        temporary = _temporary(path)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, mode)
        if fcntl is not None:
            with suppress(OSError):  # the file system lacks locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.lexists(temporary):  # not swept before it was locked
            return temporary, descriptor
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Lock a temporary file or folder; None if its writer is alive, or locks are not supported."""
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to disk, where the system supports it."""
    if hasattr(os, "O_DIRECTORY"):  # elsewhere a directory cannot be synced
        with suppress(OSError):  # not supported by some network file systems
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

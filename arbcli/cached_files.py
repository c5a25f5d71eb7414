"""Files that are made once, kept in the user's cache, and read only while they are intact.

A digest is stored next to each file. A file is used if it matches its digest, and if nobody but
this user or root can have written it: a cache may be shared, and a library in it is executed.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path

from arbcli.errors import ArbError

_HINT = "free some space there, or set `XDG_CACHE_HOME` to a folder of yours"


def cache_folder() -> Path:
    """Return where files are kept: `arb` in `XDG_CACHE_HOME`, or in `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "arb"


def is_cached(path: Path) -> bool:
    """Return whether a file that `write_cached` wrote is there and intact."""
    with suppress(OSError), _open_own(path) as file, _open_own(_digest_file(path)) as digest:
        wanted = digest.read(2 * sha256().digest_size)
        return file_digest(file, "sha256").hexdigest().encode() == wanted
    return False


def read_cached(path: Path, tell: Callable[[str], None] = lambda _: None) -> bytes | None:
    """Read a file that `write_cached` wrote; None if it is missing or not intact.

    Args:
        path: of the file.
        tell: is told in a line why a file that is there is not used.
    """
    try:
        with _open_own(path) as file, _open_own(_digest_file(path)) as digest:
            content = file.read()
            if sha256(content).hexdigest().encode() == digest.read(2 * sha256().digest_size):
                return content
        why = "it is damaged"
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or str(error)
    tell(f"ignored `{path}`: {why}")
    return None


def remove_cached(path: Path) -> None:
    """Remove a file that `write_cached` wrote, if it is there.

    Raises:
        ArbError: the cache cannot be written.
    """
    try:
        for file in (path, _digest_file(path)):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path.parent, error) from error


def write_cached(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file and its digest; other processes see all of the file, or nothing of it.

    Args:
        path: of the file, in `cache_folder()` or a folder in it, which are made if missing.
        blocks: content of the file. An OSError that it raises is taken for one of the cache.

    Raises:
        ArbError: the cache cannot be written, or other users can write to it.
    """
    digest = sha256()

    def hashed() -> Iterator[bytes]:
        for block in blocks:
            digest.update(block)
            yield block

    try:
        for folder in dict.fromkeys((cache_folder(), path.parent)):
            _make_own(folder)
        _replace(path, hashed())
        _replace(_digest_file(path), [digest.hexdigest().encode()])
    except OSError as error:
        raise _cannot_write(path.parent, error) from error


def _cannot_write(folder: Path, error: OSError) -> ArbError:
    return ArbError(f"cannot write to the cache `{folder}`: {error.strerror or error}", hint=_HINT)


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _open_own(path: Path) -> BufferedReader:
    """Open a regular file that only this user or root can have written.

    Raises:
        OSError: there is none.
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # a FIFO would block
        flags |= getattr(os, name, 0)
    file = os.fdopen(os.open(path, flags), "rb")
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and _is_own(status) and _is_own(path.parent.stat()):
        return file
    file.close()
    raise PermissionError("it is not a file to which only this user can write")


def _is_own(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):  # Windows, where modes say nothing of other users
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _make_own(folder: Path) -> None:
    """Make a folder to which only this user can write, or take that right from others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder.stat()):
        folder.chmod(0o700)  # fails in a folder of another user


def _replace(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file under a name that no other process has, and rename it once it is on the disk."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise

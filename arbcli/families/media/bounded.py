"""Files of which at most a given number of bytes is read."""

import os
from pathlib import Path
from types import TracebackType

from arbcli.base.reading import opened

HEADER_BYTES = 2**24
"""Maximum number of bytes that are read to determine a file's content."""
MIN_READ = 64
"""Minimum number of bytes that a read counts, as a decoder may search for a marker bytewise."""


class BoundedFile:
    """A file with a limit on the number of bytes read, including repeated reads.

    Decoders may read all of a damaged or forged file: a PNG may have gigabytes of comments before
    its pixels.

    Args:
        path: path of the file.
        limit: maximum number of bytes to read; `allow` raises it.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._file, self._remaining, self._limit = opened(path), limit, limit
        self._size = os.fstat(self._file.fileno()).st_size
        self.stop_reason = ""
        """Reason why the file ended early; empty if no read exceeded the limit."""

    def __enter__(self) -> "BoundedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def allow(self, num_bytes: int) -> None:
        """Raise the limit by a number of bytes."""
        self._remaining += num_bytes
        self._limit += num_bytes

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes or the rest of the file; fewer at its end, or at the limit."""
        rest = max(0, self._size - self._file.tell())
        length = rest if size < 0 else min(size, rest)
        if length > self._remaining:
            self.stop_reason = f"its decoder reads more than its limit of {self._limit:,} bytes"
        content = self._file.read(min(length, self._remaining))
        self._remaining -= min(self._remaining, max(MIN_READ, len(content)))
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek to an offset, at least 0, and return it."""
        origin = (0, self._file.tell(), self._size)[whence]
        return self._file.seek(max(0, origin + offset))

    def tell(self) -> int:
        """Return the offset in the file."""
        return self._file.tell()

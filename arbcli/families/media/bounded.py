"""Reading at most a bounded number of bytes of a file of any length."""

import os
from pathlib import Path
from types import TracebackType

from arbcli.base.reading import opened

HEADER_BYTES = 2**24
"""Maximum number of bytes that are read to determine a file's content."""
MIN_READ = 64
"""Minimum size that a read counts as, since a decoder may search for a marker byte by byte."""


class BoundedFile:
    """A file of which at most a number of bytes can be read, counting bytes that are read again.

    Decoders may read all of a file that is damaged or forged: a PNG may have gigabytes of comments
    before its pixels.

    Args:
        path: path of the file.
        limit: maximum number of bytes to read, which `allow` raises.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._file, self._left, self._allowed = opened(path), limit, limit
        self._size = os.fstat(self._file.fileno()).st_size
        self.cut_by = ""
        """Reason why the file ended early; empty if no read exceeded the bound."""

    def __enter__(self) -> "BoundedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def allow(self, more: int) -> None:
        """Raise the maximum by a number of bytes."""
        self._left += more
        self._allowed += more

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes or the rest of the file; fewer at its end, or at the bound."""
        remaining = max(0, self._size - self._file.tell())
        length = remaining if size < 0 else min(size, remaining)
        if length > self._left:
            self.cut_by = f"its decoder reads more than the {self._allowed:,} bytes of its bound"
        content = self._file.read(min(length, self._left))
        self._left -= min(self._left, max(MIN_READ, len(content)))
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek to a position, clamped to the start, and return its offset."""
        begin = (0, self._file.tell(), self._size)[whence]
        return self._file.seek(max(0, begin + offset))

    def tell(self) -> int:
        """Return the offset in the file."""
        return self._file.tell()

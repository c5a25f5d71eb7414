"""A file of which a bounded number of bytes is read, however long it is."""

import os
from pathlib import Path
from types import TracebackType

HEADER_BYTES = 2**24
"""Maximum number of bytes that are read to determine a file's content."""
SMALLEST_READ = 64
"""Bytes that each read counts at least: a decoder may look for a mark byte by byte."""


class BoundedFile:
    """A file that ends for its reader once a number of bytes has been read, again ones included.

    Decoders that are given a path may read all of a file that is damaged or made up: a PNG may have
    gigabytes of remarks before its pixels.

    Args:
        path: of the file.
        most: bytes that are read at most, until `allow` adds to them.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._file, self._left, self._allowed = path.open("rb"), most, most
        self._size = os.fstat(self._file.fileno()).st_size
        self.cut_by = ""
        """Why the file ends early, once more was asked for than is allowed, and there."""

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
        """Allow as many bytes more."""
        self._left += more
        self._allowed += more

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes or all that there are; fewer at the end, or where no more may be."""
        there = max(0, self._size - self._file.tell())
        wanted = there if size < 0 else min(size, there)
        if wanted > self._left:
            self.cut_by = f"its decoder reads more than the {self._allowed:,} bytes of its bound"
        content = self._file.read(min(wanted, self._left))
        self._left -= min(self._left, max(SMALLEST_READ, len(content)))
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek to a position, clamped to the start, and return its offset."""
        begin = (0, self._file.tell(), self._size)[whence]
        return self._file.seek(max(0, begin + offset))

    def tell(self) -> int:
        """Return the offset in the file."""
        return self._file.tell()

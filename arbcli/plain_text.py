"""Compressed and structured files as files of plain bytes, made once and kept.

Texts are mapped, so what is read is a file of plain bytes. A `.gz` or `.zst` file, the field of a
`.jsonl` or `.parquet` file, is written to such a file a block at a time, and found again by the
path, size and time of what it was made of. Its digest stands beside it and is checked each time.
"""

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from hashlib import file_digest, sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from arbcli.errors import ArbError

COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 2**20
ROWS = 1024
"""Of a Parquet file that are read at once."""


def cache_folder() -> Path:
    """Find where plain files are kept: `arb/texts` below `XDG_CACHE_HOME` or `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "arb" / "texts"


def plain_file(path: Path, field: str | None) -> Path:
    """Find the plain bytes of a file.

    Args:
        path: of a file; by its name it is compressed, or has records.
        field: which field of records is the text, one record a line; None takes JSON lines as
            they are.

    Returns:
        The file itself if it is plain, or one that is kept.

    Raises:
        ArbError: it cannot be read, has no such field, or a package is missing.
    """
    name = _name_inside(path)
    is_table = name.endswith(".parquet")
    if is_table and field is None:
        raise ArbError(
            f"`{path}` has columns, and none of them was named",
            hint="name the one with the text: `--field text`",
        )
    if name == path.name.lower() and not is_table and not (field and name.endswith(".jsonl")):
        return path
    try:
        status = path.stat()
        about = f"{os.path.realpath(path)}\n{status.st_size} {status.st_mtime_ns}\n{field or ''}"
        plain = cache_folder() / sha256(about.encode(errors="surrogateescape")).hexdigest()
        if not _is_whole(plain):
            _write(plain, _blocks(path, name, field))
    except OSError as error:
        place = error.filename or path
        raise ArbError(
            f"cannot make plain bytes of `{path}`: `{place}`: {error.strerror or error}",
            hint="check permissions and free space; `XDG_CACHE_HOME` says where they are kept",
        ) from error
    return plain


def _name_inside(path: Path) -> str:
    """Name the file that is in a compressed one, or the file itself."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def _digest_file(plain: Path) -> Path:
    return plain.with_name(f"{plain.name}.sha256")


def _is_whole(plain: Path) -> bool:
    """Tell whether a file is kept, with the bytes that were written."""
    with suppress(FileNotFoundError), plain.open("rb") as file:
        return _digest_file(plain).read_text() == file_digest(file, "sha256").hexdigest()
    return False


def _write(plain: Path, blocks: Iterator[bytes]) -> None:
    """Write a file and its digest, whole or not at all."""
    plain.parent.mkdir(parents=True, exist_ok=True)
    part = plain.with_name(f".{plain.name}.{os.getpid()}")
    digest = sha256()
    try:
        with part.open("wb") as file:
            for block in blocks:
                digest.update(block)
                file.write(block)
        part.replace(plain)
        part.write_text(digest.hexdigest())
        part.replace(_digest_file(plain))
    finally:
        part.unlink(missing_ok=True)


def _blocks(path: Path, name: str, field: str | None) -> Iterator[bytes]:
    """Read the plain bytes of a file."""
    if name.endswith(".parquet"):
        if name != path.name.lower():
            raise ArbError(
                f"`{path}` is a compressed Parquet file",
                hint="Parquet compresses by itself: unpack it",
            )
        yield from _column(path, field)
        return
    blocks = _unpacked(path)
    yield from _records(blocks, path, field) if field and name.endswith(".jsonl") else blocks


def _unpacked(path: Path) -> Iterator[bytes]:
    """Read the bytes that were compressed, by the last suffix of a name."""
    suffix = path.suffix.lower()
    zstandard = _package("zstandard", path) if suffix == ".zst" else None
    broken = zstandard.ZstdError if zstandard else (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        with gzip.open(path) if suffix == ".gz" else path.open("rb") as file:
            blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
            yield from _frames(blocks, zstandard.ZstdDecompressor()) if zstandard else blocks
    except broken as error:
        raise ArbError(
            f"`{path}` cannot be unpacked: {error}",
            hint="it is truncated or damaged: fetch it again",
        ) from None


def _frames(blocks: Iterator[bytes], decompressor: Any) -> Iterator[bytes]:
    """Unpack the frames of a Zstandard file, of which the last must be whole, too."""
    frame = None
    for block in blocks:
        while block:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise import_module("zstandard").ZstdError("it ends within a frame")


def _records(blocks: Iterator[bytes], path: Path, field: str) -> Iterator[bytes]:
    """Take a field of each line that is an object."""
    number, rest = 0, b""
    for block in itertools.chain(blocks, [b"\n"]):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            number += 1
            if line.strip():
                yield _text_of(line, number, path, field)


def _text_of(line: bytes, number: int, path: Path, field: str) -> bytes:
    try:
        text = json.loads(line)[field]
        if not isinstance(text, str):
            raise TypeError("it is no text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"it has no `{field}`" if isinstance(error, KeyError) else str(error)
        raise ArbError(
            f"line {number} of `{path}`: {why}",
            hint="each line must be an object; `--field` names the one with the text",
        ) from None
    return text.encode(errors="surrogatepass") + b"\n"


def _column(path: Path, field: str) -> Iterator[bytes]:
    arrow = _package("pyarrow", path)
    parquet = _package("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as table:
            known = table.schema_arrow.names
            if field not in known:
                raise ArbError(
                    f"`{path}` has no column `{field}`",
                    hint=f"choose one of: {', '.join(f'`{name}`' for name in known)}",
                )
            for rows in table.iter_batches(batch_size=ROWS, columns=[field]):
                for text in rows.column(0).to_pylist():
                    if isinstance(text, str | bytes):
                        yield (text.encode() if isinstance(text, str) else text) + b"\n"
                    elif text is not None:
                        raise ArbError(
                            f"the column `{field}` of `{path}` has no text",
                            hint="name another with `--field`",
                        )
    except arrow.ArrowException as error:
        raise ArbError(
            f"`{path}` cannot be read: {error}", hint="it is truncated or damaged: fetch it again"
        ) from None


def _package(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ArbError(
            f"`{path}` is read with the package {package}, which is not installed",
            hint=f"install it: `pip install {package}`",
        ) from None

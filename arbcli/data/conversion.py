"""Conversion of compressed and structured files to files of plain bytes in the cache.

Texts are memory-mapped, which requires files of plain bytes. A `.gz` or `.zst` file, the field of
records (`RECORDS`, `TABLES`, `TAR`), the texts of a tar file, a sound and a picture (see
`arbcli.families.media`) are converted to such a file block by block; its name is a hash of the
path, size and modification time of the source, and of the sounds and pictures that its records
name. A small file may unpack to terabytes, so both the output and the length of a record are
bounded.
"""

import codecs
import gzip
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from arbcli.base.caches import cache_folder, is_cached, write_cached
from arbcli.base.environment import parse_env_int
from arbcli.base.errors import ArbError, library_errors, optional_module, quoted
from arbcli.base.lazy import imported
from arbcli.base.reading import DAMAGED, unreadable
from arbcli.data.files import PLAIN, RECORDS, TABLES, TAR, Conversion, name_inside, weight_of
from arbcli.families import MEDIA, medium_of

BLOCK_BYTES = 2**20
FRAME_BYTES = 2**10
"""Bytes of a Zstandard file that are unpacked at once, as each KiB may unpack to 32 MiB."""
RECORD_BYTES = 2**24
"""Maximum length of a line of records in bytes."""
LIMIT = "ARB_UNPACKED_GIB"
"""Environment variable with the maximum size of an unpacked file in GiB."""
MIN_LIMIT, MAX_EXPANSION = 2**29, 100
"""Default maximum size: this number of bytes, or this multiple of the file's size, if larger."""


ARRAY_BYTES = 2**31
"""Maximum size of an array of records, which is read at once."""
NAMES_MEDIA = tuple(f'"{kind}"'.encode() for kind in MEDIA)
"""Keys of sounds and pictures, as they stand in the line of a record."""
MEDIA_VERSION = "media 2"
"""Version of the bytes of sounds and pictures, for the names of converted files."""
FIELDS_OF_RECORDS = (
    ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"),
    ("question", "answer"), ("text",),
)  # fmt: skip
"""Usual fields of records, whose names together are a `--field`."""
_SOURCES: dict[str, Path] = {}
"""Sources of converted files by the paths of these, for errors."""


def texts_folder() -> Path:
    """Return the folder of the cache for converted texts."""
    return cache_folder() / "texts"


def converted_file(path: Path, conversion: Conversion = PLAIN) -> Path:
    """Return the path of a file's plain bytes, which are created in the cache if needed.

    Args:
        path: path of the file; its suffix determines the conversion.
        conversion: options of the conversion.

    Returns:
        `path` if the file is plain, or the path of a file in the cache.

    Raises:
        ArbError: the file cannot be read, lacks the field or is too large unpacked; the cache
            cannot be written; or a package is missing.
    """
    name, field = name_inside(path), conversion.field
    blocks = _blocks(path, name, conversion)
    if blocks is None and name == path.name.lower():
        return path
    options = ["members"] if name.endswith(TAR) else []
    options += [field or "", *(str(option) for option in astuple(conversion)[1:] if option)]
    if medium_of(name):
        options.append(MEDIA_VERSION)
    if field is not None and name.endswith((*RECORDS, TAR)):
        options += _media_states(path, name, field)
    blocks = blocks or _unpacked(path)
    return converted(path, " ".join(options), lambda size: bounded(blocks, path, size))


def converted(path: Path, settings: str, make: Callable[[int], Iterable[bytes]]) -> Path:
    """Return the file with a conversion of a text file, created in the cache if needed.

    It is found by path, size and time of the file.

    Args:
        path: path of the file.
        settings: everything else that the conversion depends on.
        make: takes the size of the file in bytes, and returns the blocks of the conversion.

    Raises:
        ArbError: the file cannot be read, or the cache cannot be written.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    key = f"{os.path.realpath(path)}\n{status.st_size} {status.st_mtime_ns}\n{settings}"
    cached = texts_folder() / sha256(key.encode(errors="surrogateescape")).hexdigest()
    _SOURCES[os.path.abspath(cached)] = path
    if not is_cached(cached):
        write_cached(cached, make(status.st_size))
    return cached


def source_of(path: Path) -> Path:
    """Return the source of a file in the cache; any other file is returned unchanged."""
    return _SOURCES.get(os.path.abspath(path), path)


def check_records(entries: Iterable[str]) -> None:
    """Check that no named file of records would be read as plain text, including its JSON syntax.

    Files in folders, and those that globs match, are not read.

    Raises:
        ArbError: its first record has a field with texts or messages.
    """
    for entry in entries:
        path = Path(os.path.expanduser(weight_of(entry)[0]))
        record = first_record(path) if path.is_file() else {}
        for names in FIELDS_OF_RECORDS:
            if all(isinstance(record.get(name), str | list) for name in names):
                raise ArbError(
                    f"`{path}` has records with {quoted(names)}, and no `--field` was given",
                    f"add `--field {'+'.join(names)}`; or, to read the JSON itself as text,"
                    " rename the file to .txt",
                )


def first_record(path: Path) -> dict[str, Any]:
    """Return the first record of a file of JSON; empty if it has none in its first MiB.

    Raises:
        ArbError: the file cannot be unpacked.
    """
    if not name_inside(path).endswith(RECORDS):
        return {}
    text = _beginning(path).removeprefix(b"[").decode(errors="replace").lstrip()
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_array(path: Path, name: str) -> bool:
    """Return whether a file of records has them in an array."""
    return name.endswith(".json") and _beginning(path).startswith(b"[")


def _beginning(path: Path) -> bytes:
    """Return the first block of a file of JSON, without byte order mark and leading whitespace."""
    return next(_unpacked(path), b"").removeprefix(codecs.BOM_UTF8).lstrip()


def _media_states(path: Path, name: str, field: str) -> Iterator[str]:
    """Yield path, size and time of each sound and picture that the records of a file name."""
    for number, record in _records(path, name, _may_name_media):
        value = record.get(field) if isinstance(record, dict) else None
        for part in value if isinstance(value, list) else ():
            with suppress(TypeError, ValueError, OSError):  # reported when it is converted
                kind, named = _part(part)
                if kind != "text":
                    status = (path.parent / named).stat()
                    yield f"{MEDIA_VERSION} {number} {named} {status.st_size} {status.st_mtime_ns}"


def _may_name_media(line: bytes) -> bool:
    return any(mark in line for mark in NAMES_MEDIA)


def bounded(blocks: Iterator[bytes], path: Path, packed_bytes: int) -> Iterator[bytes]:
    """Yield blocks of plain bytes up to the maximum size.

    Raises:
        ArbError: there are more bytes, or the file cannot be read.
    """
    limit = max(MIN_LIMIT, MAX_EXPANSION * packed_bytes)
    if LIMIT in os.environ:
        limit = parse_env_int(os.environ, LIMIT, 1) * 2**30
    total = 0
    try:
        for block in blocks:
            total += len(block)
            if total > limit:
                raise ArbError(
                    f"`{path}`, of {packed_bytes:,} bytes, unpacks to more than {limit:,}",
                    f"if this is intended, set `{LIMIT}` to the maximum size in GiB",
                )
            yield block
    except OSError as error:
        raise unreadable(path, error) from error


def _blocks(path: Path, name: str, conversion: Conversion) -> Iterator[bytes] | None:
    """Return the converted bytes of a file; None if unpacking it is the only conversion.

    Raises:
        ArbError: the file has columns and no field was named, or it must not be compressed.
    """
    field, as_json = conversion.field, conversion.as_json
    is_packed = name != path.name.lower()
    if medium_of(name):
        if is_packed:
            raise ArbError(f"`{path}` is a compressed sound or picture", "unpack it")
        return _medium(path, conversion)
    if name.endswith(TABLES):
        if is_packed:
            raise ArbError(
                f"`{path}` is a compressed table",
                "Parquet and Arrow compress by themselves: unpack it",
            )
        if field is None and not as_json:
            raise ArbError(
                f"`{path}` has columns, and none of them was named",
                "name the one with the text: `--field text`",
            )
        from arbcli.data import tables

        return tables.rows_of(path) if as_json else tables.column_of(path, str(field))
    if name.endswith(TAR) and field is None and not as_json:
        return (content + b"\n" for _, content in _members(path, name, ".txt"))
    if as_json and (name.endswith(TAR) or _is_array(path, name)):
        return (
            json.dumps(record, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
            for _, record in _records(path, name)
        )
    if field and not as_json and name.endswith((*RECORDS, TAR)):
        records = _records(path, name)
        texts = (_text_of(record, number, path, conversion) for number, record in records)
        return itertools.chain.from_iterable(texts)
    return None


def _medium(path: Path, conversion: Conversion) -> Iterator[bytes]:
    """Yield the bytes of a sound or a picture."""
    if medium_of(path.name) == "sound":
        form = conversion.sound or "mulaw"
        return imported("arbcli.families.media.sound:sound_bytes")(path, form)
    form = conversion.picture or "rgb"
    return imported("arbcli.families.media.pictures:picture_bytes")(path, form)


def _unpacked(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, by its last suffix."""
    suffix = path.suffix.lower()
    zstandard = None
    if suffix == ".zst":
        zstandard = optional_module("zstandard", path, "zstandard", "zstandard")
    damaged = library_errors(f"`{path}` cannot be unpacked", DAMAGED, (gzip.BadGzipFile,))
    with damaged, gzip.open(path) if suffix == ".gz" else path.open("rb") as file:
        blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
        yield from _frames(blocks, zstandard.ZstdDecompressor()) if zstandard else blocks


def _frames(blocks: Iterator[bytes], decompressor: Any) -> Iterator[bytes]:
    """Unpack the frames of a Zstandard file, and check that the last one is complete."""
    frame = None
    for block in blocks:
        for start in range(0, len(block), FRAME_BYTES):
            packed = block[start : start + FRAME_BYTES]
            while packed:
                frame = frame or decompressor.decompressobj()
                plain = frame.decompress(packed)
                for begin in range(0, len(plain), BLOCK_BYTES):
                    yield plain[begin : begin + BLOCK_BYTES]
                packed = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise import_module("zstandard").ZstdError("it ends within a frame")


def _records(
    path: Path, name: str, selects: Callable[[bytes], bool] = lambda line: True
) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each record.

    Args:
        path: path of the file.
        name: its name without suffixes of compression.
        selects: whether a line is parsed.

    Raises:
        ArbError: the file is not JSON.
    """
    if name.endswith(TAR):
        for number, (member, content) in enumerate(_members(path, name, ".json"), 1):
            if selects(content):
                yield number, _parsed(content, f"`{member}` in ", path)
        return
    if _is_array(path, name):
        read = bytearray()
        for block in _unpacked(path):
            read += block
            if len(read) > ARRAY_BYTES:
                raise ArbError(
                    f"`{path}` is an array of more than {ARRAY_BYTES:,} bytes",
                    "write its records as JSON lines",
                )
        content = bytes(read)
        if selects(content):
            yield from enumerate(_parsed(content, "", path), 1)
        return
    for number, line in enumerate(_lines(_unpacked(path), path), 1):
        if line.strip() and selects(line):
            yield number, _parsed(line, f"line {number} of ", path)


def _members(path: Path, name: str, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield the members of a tar file, which is unpacked to the cache if it is compressed."""
    plain = path
    if name != path.name.lower():
        plain = converted(path, "", lambda size: bounded(_unpacked(path), path, size))
    return imported("arbcli.data.tars:members")(plain, path, suffix)


def _parsed(content: bytes, location: str, path: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArbError(
            f"{location}`{path}`: {' '.join(str(error).split())}",
            "records are JSON objects, one a line, or a JSON array of them in a .json file",
        ) from None


def _lines(blocks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without newlines; the last may lack one.

    Raises:
        ArbError: a line is longer than `RECORD_BYTES`.
    """
    unfinished: list[bytes] = []
    size = 0
    for block in itertools.chain(blocks, [b"\n"]):
        first, *others = block.split(b"\n")
        size += len(first)
        if size > RECORD_BYTES:
            raise ArbError(
                f"`{path}` has a line of more than {RECORD_BYTES:,} bytes",
                "`--field` reads an object a line: split it, or save its text as a plain file",
            )
        if first:
            unfinished.append(first)
        if others:
            yield b"".join(unfinished)
            yield from others[:-1]
            unfinished, size = [others[-1]], len(others[-1])


def _text_of(record: Any, number: int, path: Path, conversion: Conversion) -> Iterator[bytes]:
    """Yield the field of a record, which is a text or a list of parts, and a newline.

    Nothing is yielded for a field that is null, as for missing values of tables.
    """
    field = str(conversion.field)
    if isinstance(record, dict) and field not in record:
        raise ArbError(
            f"line {number} of `{path}`: it has no `{field}`",
            f"its fields are {quoted(record) or 'none'}: name one, or leave the record out",
        )
    try:
        if not isinstance(record, dict):
            raise TypeError("it is not an object")
        value = record[field]
        if value is None:
            return
        parts = [_part(part) for part in value] if isinstance(value, list) else [("text", value)]
        if not all(isinstance(part, str) for _, part in parts):
            raise TypeError("it is neither a text nor a list of parts")
        for _, part in parts:
            part.encode()  # raises UnicodeEncodeError for unpaired surrogates
    except (ValueError, TypeError) as error:
        raise ArbError(
            f"line {number} of `{path}`: {error}",
            "each line must be an object; `--field` names the one with the text, or with"
            ' parts, as in [{"text": "a dog"}, {"sound": "dog.wav"}]',
        ) from None
    for kind, part in parts:
        if kind == "text":
            yield part.encode()
            continue
        file = path.parent / part
        if not file.name.lower().endswith(MEDIA[kind]):
            raise ArbError(
                f"line {number} of `{path}`: `{part}` is not a {kind}",
                f"name a file that ends in {', '.join(MEDIA[kind])}",
            )
        try:
            yield from _medium(file, conversion)
        except OSError as error:
            raise ArbError(
                f"line {number} of `{path}`: cannot read `{part}`: {error.strerror or error}",
                "paths are relative to the file that names them",
            ) from error
    yield b"\n"


def _part(part: Any) -> tuple[str, Any]:
    """Return the kind (`text`, `sound` or `picture`) and the value of a part of a record."""
    if not isinstance(part, dict) or len(part) != 1 or not {"text", *MEDIA} & part.keys():
        raise TypeError("a part needs exactly one of `text`, `sound` and `picture`")
    return next(iter(part.items()))

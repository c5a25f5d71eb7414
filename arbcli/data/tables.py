"""Rows and columns of Parquet and Arrow files, read a batch of rows at a time."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError, library_errors, optional_module, quoted
from arbcli.base.reading import DAMAGED

ROWS = 1024
"""Number of rows that become Python objects at once."""
FILE_MAGIC = b"ARROW1"
"""First bytes of Arrow's file format; its stream format has none."""


def rows_of(path: Path) -> Iterator[bytes]:
    """Yield the rows of a table as lines of JSON, without values that are missing.

    Raises:
        ArbError: the file is damaged.
    """
    for batch in _batches(path):
        for row in batch.to_pylist():
            yield json.dumps(_as_json(row), ensure_ascii=False).encode() + b"\n"


def column_of(path: Path, field: str) -> Iterator[bytes]:
    """Yield the texts of a column, each with a newline, without values that are missing.

    Raises:
        ArbError: the file is damaged, or has no such column of texts.
    """
    for batch in _batches(path, field):
        for value in batch.column(0):
            text = _value(value, path, field)
            if isinstance(text, str | bytes):
                yield (text.encode() if isinstance(text, str) else text) + b"\n"
            elif text is not None:
                raise _no_text(path, field)


def _batches(path: Path, field: str | None = None) -> Iterator[Any]:
    """Yield up to `ROWS` rows at a time, of one column or of all.

    Raises:
        ArbError: the file is damaged, or has no such column of texts.
    """
    reading = _parquet if path.suffix.lower() == ".parquet" else _arrow
    with library_errors(f"`{path}` cannot be read", DAMAGED), reading(path, field) as batches:
        yield from batches


@contextmanager
def _parquet(path: Path, field: str | None) -> Iterator[Iterator[Any]]:
    parquet = optional_module("pyarrow.parquet", path, "pyarrow", "pyarrow")
    columns = None if field is None else [field]
    if field is not None:
        _column_index(parquet.read_schema(path), path, field)
    # as a dictionary, which stores equal values of different rows once
    with parquet.ParquetFile(path, read_dictionary=columns) as table:
        yield table.iter_batches(batch_size=ROWS, columns=columns)


@contextmanager
def _arrow(path: Path, field: str | None) -> Iterator[Iterator[Any]]:
    arrow = optional_module("pyarrow", path, "pyarrow", "pyarrow")
    with arrow.memory_map(str(path)) as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        file.seek(0)
        reader = arrow.ipc.open_file(file) if is_file else arrow.ipc.open_stream(file)
        index = None if field is None else _column_index(reader.schema, path, field)
        numbers = range(reader.num_record_batches) if is_file else ()
        batches = map(reader.get_batch, numbers) if is_file else reader

        def parts() -> Iterator[Any]:
            for batch in batches:
                if index is not None:
                    batch = batch.select([index])
                batch.validate(full=True)  # offsets of a damaged file may point anywhere
                for start in range(0, batch.num_rows, ROWS):
                    yield batch.slice(start, ROWS)

        yield parts()


def _column_index(schema: Any, path: Path, field: str) -> int:
    """Return the index of a column of texts.

    Raises:
        ArbError: there is none of this name, or it has values that consist of others.
    """
    if field not in schema.names:
        raise ArbError(
            f"`{path}` has no column `{field}`",
            f"choose one of: {quoted(schema.names)}",
        )
    index = schema.names.index(field)
    if schema.types[index].num_fields:
        raise _no_text(path, field)
    return index


def _no_text(path: Path, field: str) -> ArbError:
    return ArbError(f"the column `{field}` of `{path}` has no text", "name another with `--field`")


def _as_json(value: Any) -> Any:
    """Convert a value to one of JSON, without fields that are None: columns have all fields.

    Dates and other objects become their texts, and bytes and numbers that are not finite None.
    """
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [*map(_as_json, value)]
    if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _value(value: Any, path: Path, field: str) -> Any:
    """Convert a value of a column to an object.

    Raises:
        ArbError: it is a string that is not valid UTF-8.
    """
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise ArbError(
            f"`{path}` cannot be read: a value of `{field}` is not UTF-8: {error.reason}", DAMAGED
        ) from None

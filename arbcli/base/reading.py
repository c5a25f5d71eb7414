"""Reading of small untrusted files: size limits, parsing of JSON and TOML, schemas.

All errors are an ArbError of one line that names the file.
"""

import json
import os
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, BinaryIO, get_args, get_origin

from arbcli.base.errors import ArbError, os_error

MAX_FILE_BYTES = 2**24
"""Maximum size in bytes of a file that is read at once."""
MAX_NESTING = 64
"""Maximum nesting depth of lists and objects."""
SHOWN = 60
"""Maximum number of characters of a value in an error message."""
READ_HINT = "check the path and its permissions"
ALTERED = "it was truncated or altered: restore it from a copy"
DAMAGED = "it is truncated or damaged: fetch it again"


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a FIFO or a device could block or be endless.

    Raises:
        ArbError: it is missing, unreadable, or not regular.
    """
    try:
        with opened(path) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ArbError(f"cannot read `{path}`: it is not a regular file", READ_HINT)
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def opened(path: Path) -> BinaryIO:
    """Open a file for reading, without waiting for the other end of a FIFO.

    Raises:
        OSError: it cannot be opened, or no file can have such a name.
    """
    try:
        return open(path, "rb", opener=open_nonblocking)
    except ValueError as error:  # a zero byte, or half of a surrogate pair
        raise OSError(str(error)) from None


def unreadable(path: str | Path, error: OSError) -> ArbError:
    """Return the error of a path that cannot be read."""
    return os_error("read", path, READ_HINT, error)


def check_regular(path: Path) -> None:
    """Check that `open_regular` can open a file.

    Raises:
        ArbError: the file is missing, unreadable, or not regular.
    """
    with open_regular(path):
        pass


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a FIFO; an `opener` for `open`."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def read_small(path: Path, limit: int | None = None, advice: str = "name another file") -> bytes:
    """Read a whole file.

    Args:
        path: path of the file.
        limit: maximum size in bytes; None is `MAX_FILE_BYTES`.
        advice: hint of the error for a larger file.

    Raises:
        ArbError: it is larger, or `open_regular` refuses it.
    """
    limit = MAX_FILE_BYTES if limit is None else limit
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ArbError(f"`{path}` has more than {limit:,} bytes", advice)
    return content


def read_json(path: Path, schema: Mapping[str, Any] | None = None, hint: str = ALTERED) -> Any:
    """Read a JSON file.

    Args:
        path: path of the file.
        schema: schema of the object, see `check_schema`; None accepts any value.
        hint: hint of errors in the content.

    Raises:
        ArbError: it cannot be read, is not JSON, or does not fit the schema.
    """
    content = read_small(path)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise ArbError(f"`{path}` is not JSON: {error}", hint) from None
    if schema is not None:
        check_schema(value, schema, f"`{path}`", hint)
    return value


def read_toml(path: Path, hint: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ArbError: it cannot be read, or is not TOML.
    """
    content = read_small(path)
    try:
        return _check_nesting(tomllib.loads(content.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise ArbError(f"`{path}` is not TOML: {_reason(error)}", hint) from None


def parse_json(content: bytes) -> Any:
    """Parse JSON, which may begin with a byte order mark.

    Raises:
        ValueError: `content` is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        value = json.loads(content.decode("utf-8-sig"), parse_constant=_refuse_constant)
        is_flat = content.count(b"[") + content.count(b"{") <= MAX_NESTING
        return value if is_flat else _check_nesting(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(_reason(error)) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"`{name}` is not a number of JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).partition("; use sys.")[0]  # without Python's advice on long integers


def _check_nesting(value: Any) -> Any:
    """Return the value; raise RecursionError if it is nested too deeply."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [container for container in level if isinstance(container, dict | list)]
        if not level:
            return value
        parts = (
            container.values() if isinstance(container, dict) else container for container in level
        )
        level = [part for container in parts for part in container]
    raise RecursionError


def check_schema(values: Any, schema: Mapping[str, Any], where: str, hint: str) -> None:
    """Check that parsed JSON is an object that matches a schema.

    Args:
        values: the parsed JSON.
        schema: types by the path of the value, such as `text.entropy`. A union with None permits a
            missing value; the fields of a missing object are not checked.
        where: name of the file in errors.
        hint: hint of the error.

    Raises:
        ArbError: a value is missing or has the wrong type.
    """
    if type(values) is not dict:
        raise ArbError(f"{where} has `{shown(values)}` in place of an object", hint)
    for path, kind in schema.items():
        *outer, name = path.split(".")
        parent: Any = values
        for part in outer:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if not isinstance(parent, dict):
            continue
        value = parent.get(name)
        if not has_type(value, kind):
            reason = "it is missing" if value is None else f"it is `{shown(value)}`"
            raise ArbError(f"{where} has no valid `{path}`: {reason}", hint)


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has a type; `True` is not an int, but an int is a float."""
    return type_check(kind)(value)


@cache
def type_check(kind: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether a value has a type, for `has_type`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:  # annotated with a setting, see `arbcli.config.settings`
        return type_check(parts[0])
    if isinstance(kind, UnionType):
        tests = [type_check(part) for part in parts]
        return lambda value: any(test(value) for test in tests)
    if origin is list:
        test = type_check(parts[0])
        return lambda value: type(value) is list and all(map(test, value))
    if origin is dict:
        fits_key, fits_value = map(type_check, parts)
        return lambda value: (
            type(value) is dict
            and all(map(fits_key, value))
            and all(map(fits_value, value.values()))
        )
    if origin is tuple:
        tests = [type_check(part) for part in parts if part is not Ellipsis]
        if parts[-1] is Ellipsis:
            return lambda value: type(value) is tuple and all(map(tests[0], value))
        return lambda value: (
            type(value) is tuple
            and len(value) == len(tests)
            and all(test(part) for test, part in zip(tests, value, strict=True))
        )
    if kind is float:  # some integers are too large for a float
        return lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max
    if kind in (int, str, bool, NoneType):
        return lambda value: type(value) is kind
    return lambda value: isinstance(value, kind)


def shown(value: Any) -> str:
    """Format a value for an error message, truncated to `SHOWN` characters."""
    try:
        text = f"{value:,}" if type(value) is int else str(value)
    except (ValueError, RecursionError):  # thousands of digits, or deep nesting
        text = f"{type(value).__name__} without an end"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def file_size(path: Path) -> int:
    """Return the size of a regular, readable file in bytes.

    Raises:
        ArbError: it is missing, unreadable, or not regular.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ArbError(
            f"`{path}` is not a regular file",
            "texts are memory-mapped: write it to a file first, and name that file",
        )
    if not os.access(path, os.R_OK):
        raise unreadable(path, PermissionError("Permission denied"))
    return status.st_size

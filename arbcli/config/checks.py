"""Refusals that configurations share; a command line names its option instead of the field.

A configuration may come out of a file that anybody wrote, so nothing is taken for granted: neither
types nor sizes.
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from arbcli.errors import ArbError

LARGEST = 2**20
"""Of a size, unless it is in `LARGEST_OF`; no product of those of a tensor leaves 63 bits."""
LARGEST_OF = {"iterations": 256, "rows": 2**31 - 1}
LEAST_OF = {"place": 0}
"""Of a size, unless it is 1."""
SHOWN = 60
"""Characters of a value that are shown."""


def check_fields(config: Any) -> None:
    """Refuse a field whose value is not of its type; `True` is no int, and an int is a float.

    Args:
        config: a dataclass.

    Raises:
        ArbError: there is one.
    """
    for field in dataclasses.fields(config):
        check_type(field.name, getattr(config, field.name), field.type)


def check_type(field: str, value: Any, kind: Any) -> None:
    """Refuse a value that is not of a type; `True` is no int, and an int is a float.

    Raises:
        ArbError: it is not.
    """
    if not _is_of(value, kind):
        name = getattr(kind, "__name__", None) or str(kind)
        raise ArbError(
            f"`{field}` is `{shown(value)}`, which is no {name}",
            hint="restore the file that holds it",
            fields=(field,),
        )


def check_sizes(config: Any) -> None:
    """Refuse a size, a field of integers, that is not within its least and its largest.

    Args:
        config: a dataclass whose fields have their types.

    Raises:
        ArbError: there is one.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for size in value if isinstance(value, tuple) else (value,):
            if type(size) is int:
                check_at_least(field.name, size, LEAST_OF.get(field.name, 1))
                check_at_most(field.name, size, LARGEST_OF.get(field.name, LARGEST))


def check_schema(values: Any, schema: Mapping[str, Any], where: str, hint: str) -> None:
    """Refuse JSON with a value that is missing or has another type than its schema says.

    Args:
        values: the parsed JSON.
        schema: types, by the path of the value, such as `text.entropy`; None stands for a value
            that is missing. What is below an object that may be missing is only there with it.
        where: names the file in the error.
        hint: of the error.

    Raises:
        ArbError: there is such a value.
    """
    for path, kind in schema.items():
        *outer, name = path.split(".")
        holder = values
        for part in outer:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if holder is None and outer:
            continue
        value = holder.get(name) if isinstance(holder, dict) else None
        if not _is_of(value, kind):
            found = "it is missing" if value is None else f"it is `{shown(value)}`"
            raise ArbError(f"{where} has no valid `{path}`: {found}", hint=hint)


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_is_of(value, each) for each in get_args(kind))
    if get_origin(kind) is list:
        return type(value) is list and all(_is_of(part, get_args(kind)[0]) for part in value)
    if get_origin(kind) is dict:
        of_name, of_part = get_args(kind)
        return type(value) is dict and all(
            _is_of(name, of_name) and _is_of(part, of_part) for name, part in value.items()
        )
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if type(value) is not tuple:
            return False
        if kinds[-1] is Ellipsis:
            return all(_is_of(part, kinds[0]) for part in value)
        return len(value) == len(kinds) and all(map(_is_of, value, kinds))
    if kind is float:  # which some integers are too large for
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if kind in (int, str, bool, NoneType):
        return type(value) is kind
    return isinstance(value, kind)


def shown(value: Any) -> str:
    """Write a value of a file for an error, the first `SHOWN` characters of it."""
    try:
        text = f"{value:,}" if type(value) is int else str(value)
    except (ValueError, RecursionError):  # of thousands of digits, or tables in one another
        text = f"{type(value).__name__} without an end"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_choice(field: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that is none of those known.

    Raises:
        ArbError: it is none.
    """
    if value not in known:
        names = ", ".join(f"`{name}`" for name in known)
        raise ArbError(
            f"`{field}` is `{shown(value)}`", hint=f"choose one of: {names}", fields=(field,)
        )


def check_at_least(field: str, value: int, least: int = 1) -> None:
    """Refuse a number below what makes sense.

    Raises:
        ArbError: it is below.
    """
    if value < least:
        raise ArbError(f"`{field}` is {shown(value)}", hint=f"use {least} or more", fields=(field,))


def check_at_most(field: str, value: int, most: int) -> None:
    """Refuse a number above what anything here was made for.

    Raises:
        ArbError: it is above.
    """
    if value > most:
        raise ArbError(
            f"`{field}` is {shown(value)}", hint=f"use at most {most:,}", fields=(field,)
        )

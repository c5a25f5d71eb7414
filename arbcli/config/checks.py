"""Refusals that configurations share; a command line names its option instead of the field.

A configuration may come out of a file that anybody wrote, so nothing is taken for granted: neither
types nor sizes.
"""

import dataclasses
import math
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from arbcli.errors import ArbError

LARGEST = 2**20
"""Of a size, unless it is in `LARGEST_OF`; no product of those of a tensor leaves 63 bits."""
LARGEST_OF = {
    "layers": 1024, "outer_layers": 256, "max_moe_iters": 256, "ngram_rows": 2**31 - 1,
    "memory_rows": 2**31 - 1,
}  # fmt: skip
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
        value = getattr(config, field.name)
        if not _is_of(value, field.type):
            kind = getattr(field.type, "__name__", None) or str(field.type)
            raise ArbError(
                f"`{field.name}` is `{_shown(value)}`, which is no {kind}",
                hint="restore the file that holds it",
                fields=(field.name,),
            )


def check_sizes(config: Any) -> None:
    """Refuse a size, a field of integers, that is not within 1 and its largest.

    Args:
        config: a dataclass whose fields have their types.

    Raises:
        ArbError: there is one.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int or get_origin(field.type) is tuple:
            check_positive(field.name, value)
            for size in value if isinstance(value, tuple) else (value,):
                check_at_most(field.name, size, LARGEST_OF.get(field.name, LARGEST))


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_is_of(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if type(value) is not tuple:
            return False
        if kinds[-1] is Ellipsis:
            return all(_is_of(part, kinds[0]) for part in value)
        return len(value) == len(kinds) and all(map(_is_of, value, kinds))
    if kind is float:
        return type(value) is int or (type(value) is float and math.isfinite(value))
    if kind in (int, str, bool, NoneType):
        return type(value) is kind
    return isinstance(value, kind)


def _shown(value: Any) -> str:
    text = f"{value:,}" if type(value) is int else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_choice(field: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that is none of those known.

    Raises:
        ArbError: it is none.
    """
    if value not in known:
        names = ", ".join(f"`{name}`" for name in known)
        raise ArbError(
            f"`{field}` is `{_shown(value)}`", hint=f"choose one of: {names}", fields=(field,)
        )


def check_positive(field: str, value: int | tuple[int, ...]) -> None:
    """Refuse a size, or sizes, below 1.

    Raises:
        ArbError: there is one.
    """
    if min(value if isinstance(value, tuple) else (value,), default=1) < 1:
        raise ArbError(f"`{field}` is {_shown(value)}", hint="use 1 or more", fields=(field,))


def check_at_most(field: str, value: int, most: int) -> None:
    """Refuse a number above what anything here was made for.

    Raises:
        ArbError: it is above.
    """
    if value > most:
        raise ArbError(
            f"`{field}` is {_shown(value)}", hint=f"use at most {most:,}", fields=(field,)
        )

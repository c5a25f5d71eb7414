"""Refusals that configurations share; a command line names its option instead of the field.

A configuration may come out of a file that anybody wrote, so nothing is taken for granted: neither
types nor sizes.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from arbcli.config.settings import Setting, parted
from arbcli.errors import ArbError
from arbcli.reading import is_of, shown

LARGEST = 2**20
"""Of a size, unless it is in `LARGEST_OF`; no product of those of a tensor leaves 63 bits."""
LARGEST_OF = {"iterations": 256, "rows": 2**31 - 1}
LEAST_OF = {"place": 0}
"""Of a size, unless it is 1."""


def check_fields(config: Any) -> None:
    """Refuse a field whose value does not have its type, or is outside the bounds of its setting.

    Args:
        config: a dataclass.

    Raises:
        ArbError: there is one.
    """
    for field in dataclasses.fields(config):
        check_value(field.name, getattr(config, field.name), field.type)


def check_value(field: str, value: Any, annotation: Any) -> None:
    """Refuse a value that does not have its type, or is outside the bounds of its setting.

    Raises:
        ArbError: it does not, or is.
    """
    kind, setting = parted(annotation)
    check_type(field, value, kind)
    if setting is not None:
        check_setting(field, value, setting)


def check_setting(field: str, value: Any, setting: Setting) -> None:
    """Refuse a value that is not a choice of a setting, or outside its bounds; None is any.

    Raises:
        ArbError: it is one.
    """
    for one in value if isinstance(value, tuple) else (value,):
        if one is None:
            continue
        if setting.choices:
            check_choice(field, one, (*setting.choices, *setting.also))
        if setting.least is not None:
            check_at_least(field, one, setting.least)
        if setting.most is not None:
            check_at_most(field, one, setting.most)


def check_type(field: str, value: Any, kind: Any) -> None:
    """Refuse a value that is not of a type; `True` is not an int, and an int is a float.

    Raises:
        ArbError: it is not.
    """
    if not is_of(value, kind):
        name = getattr(kind, "__name__", None) or str(kind)
        if isinstance(value, float) and is_of(0.0, kind):
            raise ArbError(
                f"`{field}` is `{value}`", hint="use a number that is finite", fields=(field,)
            )
        raise ArbError(
            f"`{field}` is `{shown(value)}`, which is not of type {name}",
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
        if field.type is float:  # a number there may be whole, and 0
            continue
        for size in value if isinstance(value, tuple) else (value,):
            if type(size) is int:
                check_at_least(field.name, size, LEAST_OF.get(field.name, 1))
                check_at_most(field.name, size, LARGEST_OF.get(field.name, LARGEST))


def check_choice(field: str, value: object, known: Iterable[object]) -> None:
    """Refuse a value that is none of those known.

    Raises:
        ArbError: it is none.
    """
    if value not in known:
        names = ", ".join(f"`{name}`" for name in known)
        raise ArbError(
            f"`{field}` is `{shown(value)}`", hint=f"choose one of: {names}", fields=(field,)
        )


def check_at_least(field: str, value: float, least: float = 1) -> None:
    """Refuse a number below what makes sense.

    Raises:
        ArbError: it is below.
    """
    if value < least:
        raise ArbError(f"`{field}` is {shown(value)}", hint=f"use {least} or more", fields=(field,))


def check_at_most(field: str, value: float, most: float) -> None:
    """Refuse a number above what anything here was made for.

    Raises:
        ArbError: it is above.
    """
    if value > most:
        raise ArbError(
            f"`{field}` is {shown(value)}", hint=f"use at most {most:,}", fields=(field,)
        )

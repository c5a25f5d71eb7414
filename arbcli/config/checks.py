"""Validation of configurations: types, choices and bounds of fields.

Configurations may come from untrusted files, so all types and sizes are checked. Errors name fields
in `fields`, which a command line replaces by options.
"""

import dataclasses
from collections.abc import Iterable
from types import UnionType
from typing import Any, get_args, get_origin

from arbcli.base.errors import ArbError, quoted
from arbcli.base.reading import is_of, shown
from arbcli.config.settings import Setting, parted

LARGEST = 2**20
"""Upper bound of sizes not in `LARGEST_OF`; products of a tensor's sizes fit in 63 bits."""
LARGEST_OF = {"iterations": 256, "rows": 2**31 - 1, "codes": 2**28}
"""Upper bounds of sizes by field."""
LEAST_OF = {"place": 0}
"""Lower bounds of sizes by field; 1 for all others."""


def check_fields(config: Any) -> None:
    """Check types of all fields, and choices and bounds of their settings.

    Args:
        config: a dataclass.

    Raises:
        ArbError: a value has the wrong type or is out of bounds.
    """
    for field in dataclasses.fields(config):
        check_value(field.name, getattr(config, field.name), field.type)


def check_value(field: str, value: Any, annotation: Any) -> None:
    """Check the type of a value, and the choices and bounds of its setting.

    Raises:
        ArbError: it has the wrong type or is out of bounds.
    """
    kind, setting = parted(annotation)
    check_type(field, value, kind)
    if setting is not None:
        check_setting(field, value, setting)


def check_setting(field: str, value: Any, setting: Setting) -> None:
    """Check a value against the choices and bounds of a setting; None is always valid.

    Raises:
        ArbError: it is not a choice or is out of bounds.
    """
    for one in value if isinstance(value, tuple) else (value,):
        if one is None:
            continue
        if setting.choices:
            check_choice(field, one, (*setting.choices, *setting.also))
        if setting.minimum is not None:
            check_at_least(field, one, setting.minimum)
        if setting.maximum is not None:
            check_at_most(field, one, setting.maximum)


def check_type(field: str, value: Any, kind: Any) -> None:
    """Check the type of a value; `True` is not an int, but an int is a float.

    Raises:
        ArbError: it has another type, or is not finite.
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


def as_type(value: Any, kind: Any, where: str) -> Any:
    """Convert a value of a file to a type: lists to tuples, and integers to floats.

    Args:
        value: the value.
        kind: type of the field.
        where: name of the field, in backquotes, for the error.

    Raises:
        ArbError: it has another type.
    """
    choices = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    for choice in choices:
        if get_origin(choice) is tuple and isinstance(value, list):
            element = get_args(choice)[0]
            if all(type(part) is element for part in value):
                return tuple(value)
        if is_of(value, choice):
            return float(value) if choice is float else value
    names = " or ".join(getattr(c, "__name__", str(c)) for c in choices if c is not type(None))
    raise ArbError(f"{where} is `{shown(value)}`", hint=f"it takes a value of type {names}")


def check_sizes(config: Any) -> None:
    """Check the bounds of all sizes, which are the fields of integers.

    Args:
        config: a dataclass whose fields have valid types.

    Raises:
        ArbError: a size is out of bounds.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is float:  # an integer in a field of floats may be 0
            continue
        minimum, maximum = LEAST_OF.get(field.name, 1), LARGEST_OF.get(field.name, LARGEST)
        check_integers(field.name, value, minimum, maximum)


def check_integers(field: str, value: Any, minimum: int, maximum: int) -> None:
    """Check that a value, or those of a tuple, are within `minimum` and `maximum` if integers.

    Raises:
        ArbError: an integer is out of bounds.
    """
    for size in value if isinstance(value, tuple) else (value,):
        if type(size) is int:
            check_at_least(field, size, minimum)
            check_at_most(field, size, maximum)


def check_choice(field: str, value: object, known: Iterable[object]) -> None:
    """Check that a value is one of `known`.

    Raises:
        ArbError: it is not.
    """
    if value not in known:
        raise ArbError(
            f"`{field}` is `{shown(value)}`",
            hint=f"choose one of: {quoted(known)}",
            fields=(field,),
        )


def check_at_least(field: str, value: float, minimum: float = 1) -> None:
    """Check that a number is at least `minimum`.

    Raises:
        ArbError: it is smaller.
    """
    if value < minimum:
        raise ArbError(
            f"`{field}` is {shown(value)}", hint=f"use {minimum} or more", fields=(field,)
        )


def check_at_most(field: str, value: float, maximum: float) -> None:
    """Check that a number is at most `maximum`.

    Raises:
        ArbError: it is larger.
    """
    if value > maximum:
        raise ArbError(
            f"`{field}` is {shown(value)}", hint=f"use at most {maximum:,}", fields=(field,)
        )

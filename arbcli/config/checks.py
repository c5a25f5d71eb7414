"""Refusals that configurations share; a command line names its option instead of the field."""

from collections.abc import Iterable

from arbcli.errors import ArbError


def check_choice(field: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that is none of those known.

    Raises:
        ArbError: it is none.
    """
    if value not in known:
        names = ", ".join(f"`{name}`" for name in known)
        raise ArbError(f"`{field}` is `{value}`", hint=f"choose one of: {names}", fields=(field,))


def check_positive(field: str, value: int | tuple[int, ...]) -> None:
    """Refuse a size, or sizes, below 1.

    Raises:
        ArbError: there is one.
    """
    if min(value if isinstance(value, tuple) else (value,)) < 1:
        raise ArbError(f"`{field}` is {value}", hint="use 1 or more", fields=(field,))


def check_at_most(field: str, value: int, most: int) -> None:
    """Refuse a size above what anything here was made for.

    Raises:
        ArbError: it is above.
    """
    if value > most:
        raise ArbError(f"`{field}` is {value:,}", hint=f"use at most {most:,}", fields=(field,))

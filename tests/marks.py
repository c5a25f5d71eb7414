"""Which parameters of a test tell most, and which are left to `make test-all`."""

from collections.abc import Callable, Iterable

import pytest


def mostly_slow(values: Iterable, quick: Callable[..., bool]) -> list:
    """Make parameters, a tuple for several arguments; those that are not `quick` are slow."""
    found = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*parts, marks=() if quick(*parts) else pytest.mark.slow))
    return found

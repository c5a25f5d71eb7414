"""Rows of the results, by their values."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Runs = list[dict[str, Any]]
Tables = dict[str, tuple[str, Callable[[Runs], str]]]
"""Benchmark and function of each table of a page, by its name there."""


def rows_of(runs: Runs, **fields: Any) -> list[Row]:
    """List the rows that have these values."""
    rows = (row for run in runs for row in run["rows"])
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def row_of(runs: Runs, **fields: Any) -> Row | None:
    """Return the row with these values; None if it was not measured."""
    rows = rows_of(runs, **fields)
    return rows[0] if rows else None


def value(row: Row | None, field: str) -> Any:
    """Return a value of a row; None if the row was not measured."""
    return row[field] if row else None


def measured_row(runs: Runs, **fields: Any) -> Row:
    """Return the row with these values.

    Raises:
        ValueError: it was not measured.
    """
    row = row_of(runs, **fields)
    if row is None:
        raise ValueError(f"no row has {fields}")
    return row


def only(runs: Runs, **fields: Any) -> Runs:
    """Return the runs with no rows but those that have these values; runs without are left out."""
    selection = [run | {"rows": rows_of([run], **fields)} for run in runs]
    return [run for run in selection if run["rows"]]

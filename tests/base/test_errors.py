"""Errors that a user can fix."""

import traceback

from arbcli.base.errors import ArbError


def test_traceback_ends_with_the_hint():
    error = ArbError("`lr` is negative", "use a positive number")
    assert str(error) == "`lr` is negative"
    assert traceback.format_exception(error)[-1] == "hint: use a positive number\n"
    assert "hint" not in traceback.format_exception(ArbError("`lr` is negative"))[-1]

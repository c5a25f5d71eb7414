"""Configurations take and refuse the values that they did, and compute of them what they did."""

from allowed import WRITTEN, allowed


def test_every_field_takes_the_values_that_it_took():
    """`python tests/config/allowed.py` writes them again: read a difference as a change."""
    assert list(allowed()) == WRITTEN.read_text(encoding="utf-8").splitlines()

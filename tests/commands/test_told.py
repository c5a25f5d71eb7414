"""Commands tell programs of small runs what they did before."""

from told import WRITTEN, differences, tell


def test_commands_tell_of_runs_what_they_told(own_cache):
    """`python tests/commands/told.py` writes it again: what differs is to be read as a change."""
    assert differences(tell(), WRITTEN.read_text(encoding="utf-8").splitlines()) == []

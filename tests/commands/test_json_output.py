"""The JSON output of commands on small runs has not changed."""

from json_output import WRITTEN, differences, run_commands


def test_json_of_commands_is_as_recorded(own_cache):
    """`python tests/commands/json_output.py` records it again: review the difference."""
    assert differences(run_commands(), WRITTEN.read_text(encoding="utf-8").splitlines()) == []

"""The page about the system that arb re-creates names files, tests and commands that exist."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from arbcli.cli import app
from arbcli.commands._options import fill_options, repeat_options
from arbcli.kernels.registry import KERNELS

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "docs" / "system.md").read_text().splitlines()
ROWS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in (line.removeprefix("| ").removesuffix(" |") for line in LINES)
    if re.match(r"\d+ \|", line)
]
COMMANDS = sorted({row[4].strip("`") for row in ROWS})


def test_page_has_every_claim_once_with_its_state():
    assert [int(row[0]) for row in ROWS] == list(range(1, 167))
    for row in ROWS:
        assert len(row) == 5, row
        assert re.match(r"works|in part: .|left out[:, ] ?.", row[2]), row


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_files_that_are_named_exist(row):
    for path in re.findall(r"`([\w./-]+)`", row[3]):
        assert (ROOT / path).exists() or (ROOT / "arbcli" / path).exists(), path
    for page in re.findall(r"\]\(([\w-]+\.md)", " ".join(row)):
        assert (ROOT / "docs" / page).exists(), page


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command):
    program, *words = shlex.split(command)
    if program == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1])
    elif program == "pytest":
        path, _, name = words[0].partition("::")
        assert len(words) == 1
        assert (ROOT / path).exists()
        assert not name or f"def {name}(" in (ROOT / path).read_text()
    else:
        assert program == "arb"
        parsed(fill_options(repeat_options(words)))


def parsed(words: list[str]) -> None:
    """Parse words of a command line as `arb` does, and run nothing."""
    group = typer.main.get_command(app)
    if words == ["--help"]:
        return
    command = group.get_command(group.make_context("arb", list(words)), words[0])
    context = command.make_context(words[0], words[1:])
    if words[0] == "verify-kernels":
        known = {spec.name for spec in KERNELS}
        assert set(context.params["names"] or ()) <= known


@pytest.mark.parametrize("words", ["train --no-such-option", "verify-kernels --time=1"])
def test_wrong_command_is_noticed(words):
    with pytest.raises(typer.BadParameter.__bases__[0]):
        parsed(words.split())

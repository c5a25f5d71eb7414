"""A run that is killed a hundred times, with its output broken, ends in the same file."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killing.py")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [100])
def test_killed_runs_all_end_in_one_file(kills, tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(kills), "0"]
    path = {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stdout + done.stderr

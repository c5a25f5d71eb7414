"""Runs that are killed two hundred times, with their output broken, end in the same files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from apparatus.killing import RUNS

SCRIPT = Path(__file__).parent / "apparatus" / "killing.py"
KILLS = 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("name", RUNS)
def test_killed_runs_end_with_the_files_and_records_of_a_whole_run(name, tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(KILLS), "0", name]
    path = {"PYTHONPATH": f"{SCRIPT.parents[2]}{os.pathsep}{SCRIPT.parents[1]}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stdout + done.stderr

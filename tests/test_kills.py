"""Runs that are killed two hundred times, with their output broken, end in the same files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from apparatus.killing import RUNS

SCRIPT = Path(__file__).parent / "apparatus" / "killing.py"
SHAPE = "--dim 16 --layers 1 --heads 1 --ffn 16 --ctx 8 --batch 2 --steps 12 --device cpu"
KILLS = 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("name", RUNS)
def test_killed_runs_end_with_the_files_and_records_of_a_whole_run(name, tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(KILLS), "0", name]
    path = {"PYTHONPATH": f"{SCRIPT.parents[2]}{os.pathsep}{SCRIPT.parents[1]}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest", ["--json | head -1", "2>&1 | head -2", "> /dev/full 2>&1", ">&- 2>&-"],
    ids=["head of records", "head of all", "full", "closed"],
)  # fmt: skip
def test_run_whose_output_ends_early_is_finished_with_exit_0(rest, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"ternary weights learn to read. " * 200)
    arb = f"{sys.executable} -m arbcli train --data text.txt --out run {SHAPE}"
    command = ["bash", "-c", f"set -o pipefail; {arb} {rest}"]
    path = {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1", "PATH": os.defpath}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=path, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "step-000012.safetensors").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2

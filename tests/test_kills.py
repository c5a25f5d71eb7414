"""Runs that are killed two hundred times, with their output broken, end in the same files."""

import sys

import pytest
from apparatus.killing import RUNS, kill_runs


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("name", RUNS)
def test_killed_runs_end_with_the_files_and_records_of_a_whole_run(
    name, tmp_path, own_cache, monkeypatch
):
    if name == "tokens":
        pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # else it complains of the fork
    assert kill_runs(tmp_path / name, name, kills=25, seed=0) == 25

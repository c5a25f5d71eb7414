"""`arb count-params`, and `--model FILE` for every command that makes a model."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from arbcli.config.file import read_model
from arbcli.inspect.memory import predict


@pytest.mark.slow
def test_count_params_counts_three_billion_without_their_memory():
    command = [sys.executable, "-m", "arbcli", "count-params", "--preset", "arb-3b", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert json.loads(done.stdout)["total"]["weights"] == 3_122_925_280
    kilobytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of any child so far
    assert kilobytes << 10 < 2 * 2**30  # of which torch is most; the state alone is 3.7 GiB


def test_file_of_a_smaller_model_has_the_weights_that_it_says():
    path = Path(__file__).parents[2] / "examples" / "arb-2b.toml"
    assert predict(read_model(path)).total.weights == 2_216_567_968
    assert "2,216,567,968" in path.read_text()

"""Runs on Windows, where POSIX is missing, and on Macs with `mps`, which was never tried."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arbcli.kernels.runtime.device import resolve_device

SCRIPT = Path(__file__).parent / "apparatus" / "windows.py"
SIZES = ["--dim", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--batch", "2"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc to know files in use")
def test_run_needs_no_posix(tmp_path, text):
    run = str(tmp_path / "run")
    commands = [
        ["train", "--ctx", "64", *SIZES, "--data", text, "--steps", "3", "--save-every", "1",
         "--keep-best", "--eval-every", "1", "--out", run],
        ["train", "--resume", run, "--steps", "4"],
        ["generate", run, "--length", "4", "--prompt", "a"],
        ["generate", run, "--length", "4"],
        ["evaluate", run, "--data", "-", "--json"],
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(commands)],
        input=b"ternary weights learn to read. " * 9,
        capture_output=True,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert (tmp_path / "run" / "step-000004.safetensors").exists()
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["backend"] == "torch"
    unlocked = f"warning: `{run}` is not locked: do not train in it twice\n"
    assert unlocked in done.stderr.decode()
    assert not [*(tmp_path / "run").glob(".*.tmp")]


def test_mps_is_said_to_be_untried(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="^`mps` was never tried: compare its losses with `cpu`$"):
        assert resolve_device("mps").type == "mps"

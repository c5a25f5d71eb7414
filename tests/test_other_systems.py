"""Runs on Windows, where POSIX is missing, and on Macs with `mps`, which was never tried."""

import json
import sys

import pytest
import torch
from apparatus import windows
from apparatus.forking import run_forked

from arbcli.kernels.runtime.device import resolve_device

SIZES = ["--dim", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--batch", "2"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc to know files in use")
def test_run_needs_no_posix(tmp_path, text, own_cache):
    run = str(tmp_path / "run")
    commands = [
        ["train", "--ctx", "64", *SIZES, "--data", text, "--steps", "3", "--save-every", "1",
         "--keep-best", "--eval-every", "1", "--out", run],
        ["train", "--resume", run, "--steps", "4"],
        ["generate", run, "--length", "4", "--prompt", "a"],
        ["generate", run, "--length", "4"],
        ["evaluate", run, "--data", "-", "--json"],
    ]  # fmt: skip
    (tmp_path / "input").write_bytes(b"ternary weights learn to read. " * 9)
    log = tmp_path / "log"
    code = run_forked(lambda: windows.run(commands), log, read=tmp_path / "input")
    assert code == 0, log.read_text()[-3000:]
    assert (tmp_path / "run" / "step-000004.safetensors").exists()
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["backend"] == "torch"
    unlocked = f"warning: `{run}` is not locked: do not train in it twice\n"
    assert unlocked in log.read_text()
    assert not [*(tmp_path / "run").glob(".*.tmp")]


def test_mps_is_said_to_be_untried(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="^`mps` was never tried: compare its losses with `cpu`$"):
        assert resolve_device("mps").type == "mps"

"""`arb train` as a person or a program meets it: streams, exit codes, one-line errors."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import environment

from arbcli.base.errors import ArbError
from arbcli.cli import app
from arbcli.kernels.runtime.backend import default_backend
from arbcli.training import run as running
from arbcli.training.configure import new_config

SMALL = ["--dim", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--ctx", "16"]
SMALL += ["--batch", "4", "--steps", "12", "--device", "cpu"]


def test_train_prints_run_device_losses_and_checkpoint(text, tmp_path, arb_done, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = arb_done("train", "--data", text, *SMALL)
    assert done.stdout == ""
    backend = default_backend(torch.device("cpu"))
    run = "runs/001-32x1-ternary-moment-muon-lr0.7-seed0"
    for words in (f"run     {run}", "12 of 4 windows, by muon at lr 0.7, seed 0", "never a GGUF",
                  f"device  cpu, backend {backend}", "step 10/12",
                  f"checkpoint     {run}/step-000012.safetensors"):  # fmt: skip
        assert words in done.stderr
    again = arb_done("train", "--resume", "auto", "--keep", "1", "--save-every", "9")
    assert again.stderr.startswith("the run is finished: all 12 steps are done, held-out loss")
    assert [path.name for path in Path(run).glob("*.safetensors")] == ["step-000012.safetensors"]
    assert json.loads(Path(run, "config.json").read_text())["config"]["save_every"] == 9


class BrokenStream(io.StringIO):
    """Takes a few writes, then fails as a pipe whose reader has gone, or a full disk."""

    def __init__(self, error: int, writes: int) -> None:
        super().__init__()
        self.error, self.writes = error, writes

    def write(self, text: str) -> int:
        self.writes -= 1
        if self.writes < 0:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(text)


def test_quiet_resume_prints_a_loss_that_is_evaluated_again(text, tmp_path, arb_here):
    run = tmp_path / "run"
    done = arb_here("train", "--data", text, *SMALL, "--out", str(run), "--quiet")
    (run / "metrics.jsonl").unlink()
    again = arb_here("train", "--resume", str(run), "--quiet")
    assert again.stderr == done.stderr
    assert again.stderr.startswith("held-out loss")


@pytest.mark.parametrize(("error", "writes"), [(errno.EPIPE, 1), (errno.ENOSPC, 0)])
def test_train_ends_though_its_output_is_closed(error, writes, text, tmp_path, monkeypatch):
    """`arb train --json | head -1`, `2>&1 | head -2`, `> /dev/full`, a terminal that is gone."""
    monkeypatch.setattr(sys, "stdout", BrokenStream(error, writes))
    monkeypatch.setattr(sys, "stderr", BrokenStream(error, writes))
    run = tmp_path / "run"
    args = ["--steps", "2", "--batch", "1", "--json", "--out", str(run)]
    app(["train", "--data", text, *SMALL, *args], standalone_mode=False)
    assert len(sys.stdout.getvalue().splitlines()) == writes
    assert (run / "step-000002.safetensors").exists()


@pytest.mark.parametrize(("command", "error", "told"), [
    ("count-params", errno.EPIPE, ""),
    ("count-params", errno.ENOSPC, "error: cannot write to stdout: No space left"),
    ("--help", errno.ENOSPC, "error: cannot use stdout: No space left"),
    ("--help", errno.EIO, "Traceback (most recent"),
])  # fmt: skip
def test_page_that_cannot_be_written_is_a_failure(command, error, told, arb_here, monkeypatch):
    monkeypatch.setattr(sys, "stdout", BrokenStream(error, 0))
    done = arb_here(command)
    assert done.returncode == 2
    assert done.stderr.startswith(told)
    assert (done.stderr == "") == (told == "")


def test_streams_that_are_closed_are_opened_before_a_file_gets_their_place():
    code = "import os; from arbcli.base.output import note, open_closed_streams\n"
    code += "open_closed_streams(); note('x'); assert os.open(os.devnull, os.O_RDONLY) > 2"
    command = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-', sys.executable, "-c", code]
    assert subprocess.run(command, check=False).returncode == 0


def test_signal_before_anything_is_saved_has_its_own_code(text, tmp_path, arb_here, monkeypatch):
    raised = mock.Mock(side_effect=lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(running, "open_run_texts", raised)
    done = arb_here("train", "--data", text, *SMALL, "--out", str(tmp_path / "run"))
    assert done.returncode == 3
    assert done.stderr.startswith("error: stopped by SIGTERM, with nothing saved")


ERRORS = {
    "context too long": (["--ctx", "100000"], "needs a training text"),
    "more windows than memory": (["--batch", "1000000000"], "are free"),
    "width of terabytes": (["--dim", "1000000"], "are free"),
    "minutes that never end": (["--minutes", "inf"], "`--minutes` is inf"),
}
"""Errors that depend on the text or the machine; `test_early_errors` has those of options alone."""


@pytest.mark.parametrize("name", ERRORS)
def test_train_explains_a_mistake_in_two_lines(name, text, tmp_path, arb_error, monkeypatch):
    args, message = ERRORS[name]
    monkeypatch.chdir(tmp_path)
    assert message in arb_error("train", "--data", text, *args)
    assert list(tmp_path.iterdir()) == [Path(text)]


def test_stopped_resume_says_how_to_continue_alike(finished_run, arb_here, monkeypatch):
    resumed = mock.Mock(return_value=mock.Mock(run="a run", steps=3, stopped_by="SIGTERM"))
    monkeypatch.setattr("arbcli.training.resume.resume_run", resumed)
    for name in ("check_logger", "create_logger"):
        monkeypatch.setattr(f"arbcli.commands.train.{name}", mock.Mock())
    monkeypatch.setattr("arbcli.inspect.plots.require_matplotlib", mock.Mock())
    words = ["--device", "cpu", "--backend", "torch", "--log", "wandb", "--plot", "plot.png"]
    with mock.patch.dict(os.environ, environment(0, 2, 1)):
        done = arb_here("train", "--resume", str(finished_run), *words)
    expected = "continue in 2 processes with: arb train --resume 'a run' --plot plot.png --log"
    expected += " wandb --device cpu --backend torch\nerror: cannot read `a run/config.json`"
    assert done.stderr.startswith(f"stopped by SIGTERM after step 3\n{expected}")
    monkeypatch.setattr("arbcli.inspect.room.least_bytes", lambda _: 2**60)
    with pytest.raises(ArbError, match="a training step needs") as refused:
        resumed.call_args.kwargs["check"](new_config(device="cpu"))
    assert refused.value.hint == "use `--recompute` or a larger machine, or `--force` to try it"


def test_train_of_a_model_beyond_memory_starts_by_force_only(arb_here, monkeypatch):
    monkeypatch.setattr("arbcli.kernels.runtime.device.available_bytes", lambda: 2**33)
    made = mock.Mock(side_effect=ArbError("made"))
    monkeypatch.setattr("arbcli.training.run.make_directory", made)
    large = ["train", "--preset", "1b", "--device", "cpu", "--out", "nowhere"]
    told = arb_here(*large).stderr
    assert "a training step needs" in told
    assert "GiB of memory, and 8.00 GiB are free" in told
    assert "`--force`" in told
    assert "made" in arb_here(*large, "--force").stderr

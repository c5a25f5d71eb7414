"""A command in several processes: how it is started, how it ends, and which ones are refused."""

import os
import sys
from unittest import mock

import pytest
import typer
from processes import environment

from arbcli.base.errors import ArbError
from arbcli.commands import _processes
from arbcli.training.parallel.launch import Failure
from arbcli.training.parallel.process import STORE, LostProcess


@pytest.mark.parametrize(("failure", "code", "said"), [
    (None, 0, ""), (Failure(1, 2), 2, ""),
    (Failure(2, -9), 137, "process 2 was ended by SIGKILL\n"),
])  # fmt: skip
@pytest.mark.parametrize(("folder", "safe"), [(".", []), ("/bin", ["-P"])])
def test_command_is_started_in_several_processes_and_ends_as_they_do(
    failure, code, said, folder, safe, monkeypatch, capfd
):
    """A script imports nothing from the folder where it is called, and so do its processes."""
    started = mock.Mock(return_value=failure)
    monkeypatch.setattr(_processes, "launch", started)
    monkeypatch.setattr(sys, "argv", ["arb", "train", "--gpus", "3", "--accum", "6"])
    monkeypatch.setattr(sys, "path", [os.path.abspath(folder), *sys.path])
    with pytest.raises(typer.Exit) as ended:
        _processes.start_processes(3)
    assert (ended.value.exit_code, capfd.readouterr().err) == (code, said)
    command = [sys.executable, *safe, "-m", "arbcli", "train", "--gpus", "3", "--accum", "6"]
    assert started.call_args.args == (command, 3)


def test_one_of_several_processes_starts_no_others(monkeypatch, arb_here):
    monkeypatch.setattr(_processes, "launch", mock.Mock(side_effect=AssertionError("started")))
    about = environment(1, 4, 1)
    with mock.patch.dict(os.environ, about):
        with pytest.raises(ArbError, match="this is one that `torchrun` has started"):
            _processes.start_processes(3)
        done = arb_here("generate", "--checkpoint", "x")
    assert "`arb generate` runs in one process, and this is one of 4" in done.stderr
    with mock.patch.dict(os.environ, about | {STORE: "a/file"}):
        _processes.start_processes(3)


def test_error_of_several_processes_is_printed_once(tmp_path, arb_here, monkeypatch):
    """One that another process is lost is printed if that one printed none."""
    losses = mock.Mock(side_effect=[LostProcess("lost 0"), LostProcess("lost 1"), LostProcess("2")])
    monkeypatch.setattr("arbcli.training.parallel.launch.PRINT_SECONDS", 0)
    about = environment(1, 2, 1) | {STORE: str(tmp_path / "store")}
    with mock.patch.dict(os.environ, about):
        first, second = (arb_here("train", "--lr", "x") for _ in range(2))
        assert arb_here("train", "--steps", "0").stderr
        monkeypatch.setattr("arbcli.commands.train._new_settings", losses)
        assert arb_here("train").stderr == ""
    assert "error: " in first.stderr
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, "")
    assert arb_here("train", "--lr", "x").stderr == first.stderr
    with mock.patch.dict(os.environ, about | {STORE: str(tmp_path / "other" / "store")}):
        (tmp_path / "other").mkdir()
        assert [arb_here("train").stderr for _ in range(2)] == ["error: lost 1\n", ""]


def test_processes_that_choose_their_step_need_no_accum(monkeypatch, arb_here):
    started = mock.Mock(return_value=None)
    monkeypatch.setattr(_processes, "launch", started)
    words = ("train", "--init-from", "run", "--gpus", "2", "--device", "cpu")
    assert "`--accum` is 1, which 2 processes" in arb_here(*words, "--batch", "2").stderr
    for alone in (["--show-windows", "1"], ["--print-config"]):
        arb_here(*words, *alone)
    assert not started.called
    assert arb_here(*words).returncode == 0
    assert started.called

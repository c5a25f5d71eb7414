"""The shorthand for torchrun: its words, and what it says of those that failed."""

import os
import signal
import sys

import pytest

from arbcli.commands._processes import torchrun
from arbcli.train.parallel import launch


def test_command_is_started_without_its_own_option():
    words = ["train", "--gpus", "4", "--accum", "8", "--gpus=4"]
    start = [sys.executable, "-m", "arbcli.train.parallel.launch", "4"]
    assert torchrun(4, words) == [*start, "train", "--accum", "8"]


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (2, 2), (130, 130), (-9, 137)])
def test_exit_code_is_that_of_the_first_that_failed(code, expected, monkeypatch):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    started = []

    def imagined(args):
        started.append(args)
        if code is not None:
            failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")
            raise ChildFailedError("arbcli", {0: failure})

    monkeypatch.setattr(run, "run", imagined)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch.main(["2", "train", "--steps", "3"]) == expected
    assert os.environ["OMP_NUM_THREADS"] == "5"  # a user's own
    assert started[0].nproc_per_node == "2"
    assert started[0].training_script_args == ["train", "--steps", "3"]


def test_signal_that_ends_torchrun_is_in_its_exit_code(monkeypatch):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def imagined(args):
        raise SignalException("ended", sigval=signal.SIGTERM)

    monkeypatch.setattr(run, "run", imagined)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch.main(["2", "train"]) == 143
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_batch_that_cannot_be_shared_is_refused_before_any_process_starts(arb_here):
    result = arb_here("train", "--gpus", "3", "--accum", "4", "--device", "cpu")
    assert result.returncode == 2
    assert "`--accum` is 4, which 3 processes cannot share evenly" in result.stderr

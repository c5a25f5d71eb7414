"""Run `arb` without a process of its own, where no more than words and an exit code is told."""

import os
import sys
from subprocess import CompletedProcess
from unittest import mock

import pytest

from arbcli.cli import main


@pytest.fixture
def arb_here(capfd, monkeypatch):
    """Run `arb` in this process: to load torch once more takes seconds of each mistake."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["arb", *arguments])
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as stopped:
            main()
        stdout, stderr = capfd.readouterr()
        return CompletedProcess(arguments, stopped.value.code, stdout, stderr)

    return run

"""Launch of a command in several processes."""

import os
import signal
import sys

import typer

from arbcli.base.errors import ArbError
from arbcli.base.output import note
from arbcli.training.parallel.launch import launch
from arbcli.training.parallel.process import STORE, this_process

SHARED = ("train", "audit-memory")
"""Commands that can run in several processes."""


def check_shared(command: str) -> None:
    """Refuse a single-process command in one of several processes.

    Raises:
        ArbError: each process would do the same work.
    """
    process = this_process()
    if process.size > 1 and command not in SHARED:
        raise ArbError(
            f"`arb {command}` runs in one process, and this is one of {process.size}",
            "start it alone",
        )


def start_processes(number: int) -> None:
    """Run this command in `number` processes, and exit with their exit code.

    Returns only in the processes that it has started.

    Raises:
        ArbError: this process was started by `torchrun`.
    """
    if STORE in os.environ:
        return
    if this_process().size > 1:
        raise ArbError(
            "`--gpus` starts processes, and this is one that `torchrun` has started",
            "leave `--gpus` out",
        )
    # unlike the script `arb`, `-m` would import from the current folder first
    safe = [] if sys.path[:1] == [os.getcwd()] else ["-P"]
    failure = launch([sys.executable, *safe, "-m", "arbcli", *sys.argv[1:]], number)
    if failure is None:
        raise typer.Exit
    if failure.code > 0:
        raise typer.Exit(failure.code)
    note(f"process {failure.rank} was ended by {signal.Signals(-failure.code).name}")
    raise typer.Exit(128 - failure.code)

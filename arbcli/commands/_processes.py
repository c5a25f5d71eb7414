"""Start a command in several processes, and end with their exit code."""

import os
import signal
import sys

import typer

from arbcli.errors import ArbError
from arbcli.output import note
from arbcli.train.parallel.launch import STORE, launch, this_process

SHARED = ("train", "audit-memory")
"""Commands that several processes run together."""


def check_shared(command: str) -> None:
    """Refuse a command that cannot be shared in a process that is one of several.

    Raises:
        ArbError: it would do the same in each of them.
    """
    place = this_process()
    if place.size > 1 and command not in SHARED:
        raise ArbError(
            f"`arb {command}` runs in one process, and this is one of {place.size}",
            hint="start it alone",
        )


def start_processes(number: int) -> None:
    """Run this command in so many processes, and exit when they have ended.

    It returns in a process that it has started itself.

    Raises:
        ArbError: this process is one of several that `torchrun` has started.
    """
    if STORE in os.environ:
        return
    if this_process().size > 1:
        raise ArbError(
            "`--gpus` starts processes, and this is one that `torchrun` has started",
            hint="leave `--gpus` out",
        )
    # `-m` imports from the current folder first, which the script `arb` does not
    safe = [] if sys.path[:1] == [os.getcwd()] else ["-P"]
    failure = launch([sys.executable, *safe, "-m", "arbcli", *sys.argv[1:]], number)
    if failure is None:
        raise typer.Exit
    if failure.code > 0:
        raise typer.Exit(failure.code)
    note(f"process {failure.rank} was ended by {signal.Signals(-failure.code).name}")
    raise typer.Exit(128 - failure.code)

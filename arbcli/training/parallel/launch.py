"""Launch of a run's processes on this machine, and the rank of this process.

The rendezvous is a file in a private folder. Processes are killed when the launcher ends.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import NamedTuple

from arbcli.base.output import fail, note
from arbcli.base.signals import RecordedSignal
from arbcli.training.parallel.process import STORE

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable of `torchrun`: a file in a folder of the process, in a private one of the attempt."""
POLL_SECONDS = 0.05
PRINT_SECONDS = 1
"""Time for the failed process to print its error, which causes the errors of the others."""
TERMINATE_SECONDS, KILL_SECONDS = 2, 25
"""Seconds after a failure until other processes get SIGTERM, and until they are killed."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: signal to receive when the parent ends."""


class Failure(NamedTuple):
    """The process that failed first."""

    rank: int
    code: int
    """Exit code; the negative number of the signal that killed it."""


def launch(command: Sequence[str], number: int) -> Failure | None:
    """Run a command in several processes of this machine, and wait for them.

    The first stopping signal is forwarded to all processes, which end in their own time. A second
    one kills them.

    Args:
        command: program and arguments.
        number: number of processes.

    Returns:
        The first failure; None if there was none.

    Raises:
        Interrupted: a second signal was received.
    """
    processes: list[Popen] = []
    with TemporaryDirectory(prefix="arb-") as folder, RecordedSignal() as stop:
        shared = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        shared |= {STORE: str(Path(folder) / "store")}
        try:
            for rank in range(number):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(_start(command, shared | ranks))
            return _first_failure(processes, stop)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def fail_once(message: str, hint: str | None = None) -> None:
    """Print an error, unless another process of this machine has printed it."""
    if not _is_printed(message):
        fail(message, hint)


def fail_lost(message: str, hint: str | None) -> None:
    """Print the error about a lost process, unless another one of the launcher prints its own."""
    if STORE not in os.environ:
        fail_once(message, hint)
        return
    folder, until = Path(os.environ[STORE]).parent, time.monotonic() + PRINT_SECONDS
    while not any(folder.glob("?" * 2 * sha256().digest_size)):
        if time.monotonic() > until:
            if not _is_printed("lost"):
                fail(message, hint)
            return
        time.sleep(POLL_SECONDS)


def _is_printed(message: str) -> bool:
    """Return whether a process of the same launcher has printed an error; mark it as printed."""
    if STORE in os.environ:
        folder = Path(os.environ[STORE]).parent
    elif ERROR_FILE in os.environ:
        folder = Path(os.environ[ERROR_FILE]).parents[1]
    else:
        return False
    name = sha256(message.encode(errors="backslashreplace")).hexdigest()
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # full disk: better printed twice than never
        return False
    return False


def _start(command: Sequence[str], variables: dict[str, str]) -> Popen:
    """Start a process with additional environment variables, in its own session.

    Signals of the terminal therefore only reach the launcher.
    """
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | variables
    preexec = None
    if sys.platform == "linux":
        preexec = partial(_end_with, os.getpid(), ctypes.CDLL(None).prctl)
    return Popen(command, env=environment, start_new_session=True, preexec_fn=preexec)


def _end_with(parent: int, prctl: Callable[[int, int], int]) -> None:
    """Make the kernel kill this process when its parent ends, even by SIGKILL."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _first_failure(processes: Sequence[Popen], stop: RecordedSignal) -> Failure | None:
    """Wait until all processes have ended, or until `KILL_SECONDS` after a failure."""
    running, failure = dict(enumerate(processes)), None
    forwarded = terminated = False
    while running:
        if stop.received and not forwarded:
            forwarded = True
            note(
                f"stopping by {stop.received.name}: processes finish the step and save; a second"
                " signal kills them"
            )
            for process in running.values():
                process.send_signal(stop.received)
        ended = {
            rank: code for rank, process in running.items() if (code := process.poll()) is not None
        }
        for rank in ended:
            del running[rank]
        if failure is None and any(ended.values()):
            # negative codes first: a killed process causes the failures of others
            code, rank = min((code, rank) for rank, code in ended.items() if code)
            failure, failed_at = Failure(rank, code), time.monotonic()
        if failure is not None:
            seconds = time.monotonic() - failed_at
            if seconds > KILL_SECONDS:
                break
            if seconds > TERMINATE_SECONDS and not terminated:
                terminated = True
                for process in running.values():
                    process.terminate()
        time.sleep(POLL_SECONDS if running else 0)
    return failure

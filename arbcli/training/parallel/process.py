"""The rank of this process in a run, and the error about a lost one."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import NamedTuple, TypeVar

from arbcli.base.environment import parse_env_int
from arbcli.base.errors import ArbError, quoted

STORE = "ARB_STORE"
"""Environment variable with the path of the rendezvous file of `launch`."""
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
"""Environment variables of `torchrun`: ranks, and the address of the rendezvous."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
TOGETHER = "start all of them together"
SAME_PROGRAM = f"{TOGETHER}, with the same arguments, files and versions"
RESUME = "continue from the last checkpoint with `--resume`, with any number of processes"
T = TypeVar("T")


class LostProcess(ArbError):
    """A collective failed, as another process has ended or cannot be reached."""


class ProcessRank(NamedTuple):
    """The rank of this process; the defaults are those of a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""
    one_machine: bool = True
    """Whether all processes are on this machine."""


def this_process(environment: Mapping[str, str] = os.environ) -> ProcessRank:
    """Read the rank of this process from the environment of `launch` or `torchrun`.

    Raises:
        ArbError: a variable is not a number, or is out of range.
    """
    where = (STORE,) if STORE in environment else MASTER
    if not all(name in environment for name in (*RANKS, *where)):
        return ProcessRank()
    if where == MASTER:
        parse_env_int(environment, "MASTER_PORT", 1, 65535)
    size = parse_env_int(environment, "WORLD_SIZE", 1)
    rank = parse_env_int(environment, "RANK", 0, size - 1)
    local_rank = parse_env_int(environment, "LOCAL_RANK", 0, size - 1)
    one_machine = environment.get("LOCAL_WORLD_SIZE") == str(size)
    one_machine |= environment.get("MASTER_ADDR") in LOCAL_HOSTS
    return ProcessRank(rank, size, local_rank, one_machine)


def check_single_process(environment: Mapping[str, str] = os.environ) -> None:
    """Check that a single-process run was not started by a launcher of several processes.

    Raises:
        ArbError: `RANK` is set, but not all other variables of `torchrun`.
    """
    missing = [name for name in (*RANKS, *MASTER) if name not in environment]
    size = environment.get("WORLD_SIZE", "1")
    if missing and size != "1" and "RANK" in environment:
        raise ArbError(
            f"`WORLD_SIZE` is {size}, without {quoted(missing)}",
            "set all variables of `torchrun`, or unset `RANK` to train in one process",
        )


def process_name(rank: int, hosts: Sequence[str]) -> str:
    """Return the name of a process for messages, with its machine if there are several.

    Args:
        rank: rank of the process.
        hosts: name of the machine of each process; empty if there is one.
    """
    return f"process {rank} on `{hosts[rank]}`" if len({*hosts}) > 1 else f"process {rank}"


@contextmanager
def lost_process_errors() -> Iterator[None]:
    """Convert torch's error about a lost process to a `LostProcess`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise LostProcess(
            f"another process of the run is lost, or does not answer: {reason}", hint=RESUME
        ) from error


def call_with_timeout(seconds: float, make: Callable[[], T]) -> T:
    """Call a function in a thread, with a timeout and so that signals are handled.

    Raises:
        TimeoutError: it did not return in time; the thread keeps running.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future.result(seconds)

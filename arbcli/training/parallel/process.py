"""The rank of this process in a run, and the error about a lost one."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from arbcli.base.environment import number_in
from arbcli.base.errors import ArbError

STORE = "ARB_STORE"
"""Environment variable with the path of the rendezvous file of `launch`."""
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
"""Environment variables of `torchrun`: ranks, and the address of the rendezvous."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
TOGETHER = "start all of them together"
SAME_PROGRAM = f"{TOGETHER}, with the same arguments, files and versions"


class Place(NamedTuple):
    """The rank of this process; the defaults are those of a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""
    one_machine: bool = True
    """Whether all processes are on this machine."""


def this_process(environment: Mapping[str, str] = os.environ) -> Place:
    """Read the rank of this process from the environment of `launch` or `torchrun`.

    Raises:
        ArbError: a variable is not a number, or is out of range.
    """
    where = (STORE,) if STORE in environment else MASTER
    if not all(name in environment for name in (*RANKS, *where)):
        return Place()
    if where == MASTER:
        number_in(environment, "MASTER_PORT", 1, 65535)
    size = number_in(environment, "WORLD_SIZE", 1)
    rank = number_in(environment, "RANK", 0, size - 1)
    local_rank = number_in(environment, "LOCAL_RANK", 0, size - 1)
    one_machine = environment.get("LOCAL_WORLD_SIZE") == str(size)
    one_machine |= environment.get("MASTER_ADDR") in LOCAL_HOSTS
    return Place(rank, size, local_rank, one_machine)


@contextmanager
def explained_loss() -> Iterator[None]:
    """Convert torch's error about a lost process to an `ArbError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise ArbError(
            f"another process of the run is lost, or does not answer: {reason}",
            hint="continue from the last checkpoint with `--resume`, with any number of processes",
        ) from error

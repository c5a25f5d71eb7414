"""The rendezvous of a run: all processes must arrive in time, and run the same program."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from arbcli.base.environment import number_in
from arbcli.base.errors import ArbError
from arbcli.training.parallel.process import (
    MASTER,
    SAME_PROGRAM,
    STORE,
    TOGETHER,
    Place,
    explained_loss,
)
from arbcli.version import __version__

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
"""Environment variables that select the interface; `=` makes NCCL match the exact name."""
ABORT_SECONDS = 15
WAIT = "ARB_JOIN_SECONDS"
"""Environment variable with the timeout of the rendezvous in seconds."""
WAIT_SECONDS = 20
STORE_TIMEOUT = timedelta(minutes=30)
"""Timeout of the store after the rendezvous; torch's default for collectives."""
POLL_SECONDS = 0.05
READ_SECONDS = 2
"""Time for which the process with the store waits for others to read the outcome."""
OUTCOME, READERS = "outcome", "readers"
ALL_HERE = "all are here"
T = TypeVar("T")


def seconds_to_join() -> int:
    """Return the timeout of the rendezvous in seconds.

    Raises:
        ArbError: the environment variable is invalid.
    """
    return number_in(os.environ, WAIT, 1) if WAIT in os.environ else WAIT_SECONDS


def connect(place: Place, device: torch.device, command: str) -> None:
    """Wait for all processes, and initialise the process group.

    Args:
        place: rank of this process.
        device: device of transferred tensors.
        command: name of the command, which must be the same in all processes.

    Raises:
        ArbError: processes are missing, do not answer, or run another command or version.
    """
    if place.one_machine:
        os.environ |= INTERFACES
    store = meet(place, command)
    on_gpus = device.type == "cuda"

    def initialise() -> None:
        if on_gpus:
            torch.cuda.set_device(device)  # it is a property of the thread
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            rank=place.rank,
            world_size=place.size,
            store=store,
            device_id=device if on_gpus else None,
        )

    seconds = seconds_to_join()
    try:
        with explained_loss():
            within(seconds, initialise)
    except TimeoutError:
        raise ArbError(
            f"another process of the run ended, or does not connect within {seconds} s",
            hint=f"{SAME_PROGRAM}, or set `{WAIT}` to wait longer",
        ) from None


def abort() -> None:
    """Abort all communication, without waiting for other processes.

    It has a time limit, so that the original error is reported even if NCCL hangs.
    """
    if dist.group.WORLD is None:
        return
    thread = Thread(target=dist.group.WORLD.abort, daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)


def meet(place: Place, command: str) -> dist.Store:
    """Wait for all processes, and check that they run the same program.

    Args:
        place: rank of this process.
        command: name of the command.

    Returns:
        The shared store.

    Raises:
        ArbError: in all processes, if one did not arrive in time or runs another program.
    """
    seconds = seconds_to_join()
    deadline = time.monotonic() + seconds
    store, holds = _open_store(place, seconds)
    store.set_timeout(STORE_TIMEOUT)
    places = [f"program-{rank}" for rank in range(place.size)]
    store.set(places[place.rank], json.dumps(program(command)))
    outcome = None
    while outcome is None:
        missing = [rank for rank, key in enumerate(places) if not store.check([key])]
        if store.check([OUTCOME]):
            outcome = store.get(OUTCOME).decode()
        elif not missing:
            outcome = _difference([json.loads(store.get(key)) for key in places]) or ALL_HERE
        elif time.monotonic() > deadline:
            listed = ", ".join(map(str, missing[:5]))
            outcome = f"of {place.size} processes these did not join within {seconds} s: {listed}"
            outcome += f"\n{TOGETHER}, or set `{WAIT}` to wait longer"
        else:
            time.sleep(POLL_SECONDS)
    outcome = store.compare_set(OUTCOME, "", outcome).decode()  # the first outcome is decisive
    readers = store.add(READERS, 1)
    if outcome == ALL_HERE:
        return store
    until = time.monotonic() + READ_SECONDS
    while holds and readers < place.size - len(missing) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        readers = store.add(READERS, 0)
    message, _, hint = outcome.partition("\n")
    raise ArbError(message, hint=hint or SAME_PROGRAM)


def program(command: str) -> dict[str, str]:
    """Return the properties that must be equal in all processes, by name."""
    return {
        "command": command,
        "version of arb": __version__,
        "version of torch": torch.__version__,
        "digest of arb's sources": source_digest()[:16],
    }


def source_digest(package: Path = Path(__file__).parents[2]) -> str:
    """Return the SHA-256 of this package's sources and their paths."""
    digest = sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".c"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _difference(programs: Sequence[dict[str, str]]) -> str | None:
    """Describe the first difference from process 0; None if there is none."""
    for rank, other in enumerate(programs):
        for name, value in programs[0].items():
            if other.get(name) != value:
                return (
                    f"process {rank} has another {name} than process 0:"
                    f" `{other.get(name)}`, and not `{value}`"
                )
    return None


def _open_store(place: Place, seconds: int) -> tuple[dist.Store, bool]:
    """Open the shared store; also return whether this process hosts it.

    Raises:
        ArbError: process 0 cannot listen there, or does not answer.
    """
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE], place.size), False
    host, port = os.environ[MASTER[0]], number_in(os.environ, MASTER[1], 1, 2**16 - 1)
    store = partial(
        dist.TCPStore, host, port, place.size, timeout=STORE_TIMEOUT, wait_for_workers=False
    )
    # torchrun's own process may hold the store instead
    holds = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if holds:
        store = partial(store, is_master=True, master_listen_fd=_listen(host, port))
    try:
        return within(seconds, store), holds
    except (TimeoutError, RuntimeError) as error:
        raise ArbError(
            f"process 0 does not answer at the rendezvous `{host}:{port}`",
            hint=f"start it; if another program has the port, set `{MASTER[1]}` to another one",
        ) from error


def _listen(host: str, port: int) -> int:
    """Listen at one address, unlike torch, which listens at all; return the descriptor."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]
        raise ArbError(
            f"process 0 cannot listen at `{host}:{port}`: {reason}",
            hint=f"set `{MASTER[0]}` to an address of its machine and `{MASTER[1]}` to a free port",
        ) from error


def within(seconds: float, make: Callable[[], T]) -> T:
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

"""The rendezvous of a run: all processes must arrive in time, and run the same program."""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist

from arbcli.base.environment import parse_env_int
from arbcli.base.errors import ArbError
from arbcli.training.parallel.heartbeat import Heartbeat
from arbcli.training.parallel.process import (
    MASTER,
    SAME_PROGRAM,
    STORE,
    TOGETHER,
    ProcessRank,
    call_with_timeout,
    lost_process_errors,
    process_name,
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
"""Time for which process 0 waits for others to read the outcome: the store may end with it."""
OUTCOME, READERS = "outcome", "readers"
ALL_JOINED = "all processes have joined"


def seconds_to_join() -> int:
    """Return the timeout of the rendezvous in seconds.

    Raises:
        ArbError: the environment variable is invalid.
    """
    return parse_env_int(os.environ, WAIT, 1) if WAIT in os.environ else WAIT_SECONDS


def connect(
    process: ProcessRank, device: torch.device, command: str
) -> tuple[Sequence[str], Heartbeat | None]:
    """Wait for all processes, and initialise the process group.

    Args:
        process: rank of this process.
        device: device of transferred tensors.
        command: name of the command, which must be the same in all processes.

    Returns:
        The name of each process's machine, and the heartbeat of this process; None with a
        launcher, which itself watches its processes.

    Raises:
        ArbError: processes are missing, do not answer, or run another command or version.
    """
    if process.one_machine:
        os.environ |= INTERFACES
    with lost_process_errors():
        store, hosts = wait_for_all(process, command)
    heartbeat = None
    if STORE not in os.environ:
        heartbeat_store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        heartbeat = Heartbeat(heartbeat_store, process.rank, hosts)
    uses_gpus = device.type == "cuda"

    def initialise() -> None:
        if uses_gpus:
            torch.cuda.set_device(device)  # it is a property of the thread
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if uses_gpus else "gloo",
            rank=process.rank,
            world_size=process.size,
            store=store,
            device_id=device if uses_gpus else None,
        )

    seconds = seconds_to_join()
    try:
        with lost_process_errors():
            call_with_timeout(seconds, initialise)
    except TimeoutError:
        raise ArbError(
            f"another process of the run ended, or does not connect within {seconds} s",
            f"{SAME_PROGRAM}, or set `{WAIT}` to wait longer",
        ) from None
    if heartbeat is not None:
        heartbeat.start()
    return hosts, heartbeat


def abort() -> None:
    """Abort all communication, without waiting for other processes.

    It has a time limit, so that the original error is reported even if NCCL hangs.
    """
    if dist.group.WORLD is None:
        return
    thread = Thread(target=dist.group.WORLD.abort, daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)


def wait_for_all(process: ProcessRank, command: str) -> tuple[dist.Store, list[str]]:
    """Wait for all processes, and check that they run the same program.

    Args:
        process: rank of this process.
        command: name of the command.

    Returns:
        The shared store, and the name of each process's machine.

    Raises:
        ArbError: in all processes, if one did not arrive in time or runs another program.
    """
    seconds = seconds_to_join()
    deadline = time.monotonic() + seconds
    store = _open_store(process, seconds)
    store.set_timeout(STORE_TIMEOUT)
    keys = [f"program-{rank}" for rank in range(process.size)]
    store.set(keys[process.rank], json.dumps([socket.gethostname(), fingerprint(command)]))
    outcome = None
    while outcome is None:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if store.check([OUTCOME]):
            outcome = store.get(OUTCOME).decode()
        elif not missing:
            hosts, programs = zip(*(json.loads(store.get(key)) for key in keys), strict=True)
            outcome = _difference(programs, hosts) or ALL_JOINED
        elif time.monotonic() > deadline:
            listed = ", ".join(map(str, missing[:5]))
            outcome = f"of {process.size} processes these did not join within {seconds} s: {listed}"
            outcome += f"\n{TOGETHER}, or set `{WAIT}` to wait longer"
        else:
            time.sleep(POLL_SECONDS)
    outcome = store.compare_set(OUTCOME, "", outcome).decode()  # the first outcome is decisive
    readers = store.add(READERS, 1)
    if outcome == ALL_JOINED:
        return store, [json.loads(store.get(key))[0] for key in keys]
    until = time.monotonic() + READ_SECONDS
    while process.rank == 0 and time.monotonic() < until:
        if readers == sum(store.check([key]) for key in keys):  # all that have joined
            break
        time.sleep(POLL_SECONDS)
        readers = store.add(READERS, 0)
    message, _, hint = outcome.partition("\n")
    raise ArbError(message, hint or SAME_PROGRAM)


def fingerprint(command: str) -> dict[str, str]:
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


def _difference(programs: Sequence[dict[str, str]], hosts: Sequence[str]) -> str | None:
    """Describe the first difference from process 0; None if there is none."""
    for rank, program in enumerate(programs):
        for name, value in programs[0].items():
            if program.get(name) != value:
                return (
                    f"{process_name(rank, hosts)} has another {name} than process 0:"
                    f" `{program.get(name)}`, and not `{value}`"
                )
    return None


def _open_store(process: ProcessRank, seconds: int) -> dist.Store:
    """Open the shared store, which process 0 hosts, or its `torchrun`.

    Raises:
        ArbError: process 0 cannot listen there, or does not answer.
    """
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE], process.size)
    host, port = os.environ[MASTER[0]], parse_env_int(os.environ, MASTER[1], 1, 2**16 - 1)
    store = partial(
        dist.TCPStore, host, port, process.size, timeout=STORE_TIMEOUT, wait_for_workers=False
    )
    # torchrun's own process may hold the store instead
    hosts_store = process.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if hosts_store:
        store = partial(store, is_master=True, master_listen_fd=_listen(host, port))
    try:
        opened = call_with_timeout(seconds, store)
    except (TimeoutError, RuntimeError) as error:
        raise ArbError(
            f"process 0 does not answer at the rendezvous `{host}:{port}`",
            f"start it; if another program has the port, set `{MASTER[1]}` to another one",
        ) from error
    # a store of torchrun has the keys of earlier attempts too
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", opened)


def _listen(host: str, port: int) -> int:
    """Listen at one address, unlike torch, which listens at all; return the descriptor."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]
        raise ArbError(
            f"process 0 cannot listen at `{host}:{port}`: {reason}",
            f"set `{MASTER[0]}` to an address of its machine and `{MASTER[1]}` to a free port",
        ) from error

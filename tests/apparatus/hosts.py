"""Two machines on one: network namespaces that a cable joins, each with a name and a folder.

It needs Linux, root and `ip`. Processes are forked from this one, which has loaded everything.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from apparatus.killing import start

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}
INTERFACES = {name: f"cable-{name}" for name in ADDRESSES}
PROCESSES = 2
"""Processes of a machine."""
LONGEST = 120
"""Seconds that anything may take, so that what hangs fails."""


@dataclass
class Machines:
    """Machines `a` and `b` with a run that they share.

    Args:
        spaces: names of the network namespaces, by machine.
        folder: a folder for logs, and for the current folder of each machine.
    """

    spaces: dict[str, str]
    folder: Path
    pids: dict[str, list[int]] = field(default_factory=dict)
    """Processes that run, by machine."""

    def home(self, name: str) -> Path:
        """Return the current folder of a machine's processes."""
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name

    def start(self, name: str, *words: str, **variables: str) -> None:
        """Start the processes of a machine: `arb` with these words."""
        first = [*self.spaces].index(name) * PROCESSES
        shared = {"WORLD_SIZE": PROCESSES * len(self.spaces), "LOCAL_WORLD_SIZE": PROCESSES}
        shared |= {"MASTER_ADDR": ADDRESSES["a"], "MASTER_PORT": 29500}
        shared |= {"GLOO_SOCKET_IFNAME": INTERFACES[name]} | variables
        self.pids[name] = []
        for local in range(PROCESSES):
            ranks = {"RANK": first + local, "LOCAL_RANK": local}
            environment = {key: str(value) for key, value in (shared | ranks).items()}

            def enter(environment: dict[str, str] = environment) -> None:
                enter_namespace(self.spaces[name], name)
                os.chdir(self.home(name))
                os.environ |= environment

            log = self.folder / f"{name}{local}.log"
            log.unlink(missing_ok=True)
            self.pids[name].append(start([*words], "kept", log, enter))

    def send(self, name: str, number: int) -> None:
        """Send a signal to all processes of a machine."""
        for pid in self.pids[name]:
            os.kill(pid, number)

    def cut(self) -> None:
        """Cut the cable."""
        ip("-n", self.spaces["a"], "link", "set", "dev", INTERFACES["a"], "down")

    def wait(self, name: str) -> tuple[list[int], list[str]]:
        """Wait for the processes of a machine; return their exit codes and what each printed.

        Raises:
            TimeoutError: they have not ended in time.
        """
        until, codes = time.monotonic() + LONGEST, []
        for pid in self.pids.pop(name):
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
                if time.monotonic() > until:
                    self.pids[name] = [pid]
                    raise TimeoutError(f"a process of {name} has not ended")
                time.sleep(0.02)
            codes.append(os.waitstatus_to_exitcode(ended[1]))
        logs = [self.folder / f"{name}{local}.log" for local in range(PROCESSES)]
        return codes, [log.read_text() if log.exists() else "" for log in logs]

    def kill(self) -> None:
        """Kill what still runs."""
        for name in [*self.pids]:
            self.send(name, signal.SIGKILL)
            self.wait(name)


def enter_namespace(space: str, name: str) -> None:
    """Move this process to a network namespace, on a machine of this name."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{space}", os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    if libc.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), "cannot name the machine")


def ip(*words: str) -> None:
    """Run the command `ip`.

    Raises:
        OSError: it is missing.
        CalledProcessError: it failed.
    """
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_make_machines() -> bool:
    """Return whether this process may make network namespaces."""
    space = f"arb-{os.getpid()}-tried"
    try:
        ip("netns", "add", space)
        ip("netns", "delete", space)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Make two machines for the block, and kill what still runs on them afterwards.

    Raises:
        OSError, CalledProcessError: as `ip`.
    """
    spaces = {name: f"arb-{os.getpid()}-{name}" for name in ADDRESSES}
    try:
        for space in spaces.values():
            ip("netns", "add", space)
        cable = ["link", "add", INTERFACES["a"], "netns", spaces["a"], "type", "veth"]
        ip(*cable, "peer", "name", INTERFACES["b"], "netns", spaces["b"])
        for name, space in spaces.items():
            ip("-n", space, "address", "add", f"{ADDRESSES[name]}/24", "dev", INTERFACES[name])
            ip("-n", space, "link", "set", "dev", "lo", "up")
            ip("-n", space, "link", "set", "dev", INTERFACES[name], "up")
        pair = Machines(spaces, folder)
        try:
            yield pair
        finally:
            pair.kill()
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)

"""CPU affinity: pins the threads of a process to one socket, near its memory and GPU."""

import os
from pathlib import Path

from arbcli.base.errors import ArbError

ROOT = Path("/")


def sockets(root: Path = ROOT) -> dict[int, set[int]]:
    """Return the processors that this process may use, by socket number.

    Args:
        root: root of the file system with `/sys`.
    """
    cpus_by_socket: dict[int, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"
        try:
            number = int(path.read_text())
        except (OSError, ValueError):
            number = 0
        cpus_by_socket.setdefault(number, set()).add(cpu)
    return cpus_by_socket


def gpu_cpus(index: int, root: Path = ROOT) -> set[int]:
    """Return the processors local to an NVIDIA GPU; empty if unknown.

    Args:
        index: index of the GPU among the visible ones.
        root: as in `sockets`.
    """
    try:
        addresses = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").iterdir())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        numbers = list(map(int, visible.split(","))) if visible else range(len(addresses))
        address = addresses[numbers[index]].lower()
        return _numbers((root / f"sys/bus/pci/devices/{address}/local_cpulist").read_text())
    except (OSError, ValueError, IndexError):
        return set()


def _numbers(text: str) -> set[int]:
    """Parse a list of processors, such as `0-31,64-95`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def pin_to_socket(process: int, *, uses_cpu: bool, root: Path = ROOT) -> tuple[int, set[int]]:
    """Pin all threads of this process, and those that they start, to one socket.

    The socket is that of the process's GPU; on a CPU, processes take the sockets in turn.

    Args:
        process: local rank of the process.
        uses_cpu: whether the process computes on the CPU.
        root: as in `sockets`.

    Returns:
        The number of the socket, and its processors.

    Raises:
        ArbError: the system does not support affinity, or has one socket.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ArbError("this system does not support pinning", "leave `--pin` out")
    cpus_by_socket = sockets(root)
    if len(cpus_by_socket) < 2:
        raise ArbError(
            "`--pin` needs several sockets, and this process can only use one", "leave `--pin` out"
        )
    local_cpus = set() if uses_cpu else gpu_cpus(process, root)
    default = sorted(cpus_by_socket)[process % len(cpus_by_socket)]
    socket = max(cpus_by_socket, key=lambda n: (len(cpus_by_socket[n] & local_cpus), n == default))
    for thread in (ROOT / "proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpus_by_socket[socket])
    return socket, cpus_by_socket[socket]

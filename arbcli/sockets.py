"""Keep the threads of a process on the processors of one socket, near its memory and its GPU."""

import os
from pathlib import Path

from arbcli.errors import ArbError

ROOT = Path("/")


def sockets(root: Path = ROOT) -> dict[int, set[int]]:
    """List the processors that this process may use, by the number of their socket.

    Args:
        root: of the file system that the kernel describes them in.
    """
    found: dict[int, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"
        try:
            number = int(path.read_text())
        except (OSError, ValueError):
            number = 0
        found.setdefault(number, set()).add(cpu)
    return found


def near_gpu(index: int, root: Path = ROOT) -> set[int]:
    """List the processors that are near a GPU of NVIDIA; none if the system does not say.

    Args:
        index: of the GPU among those that are visible.
        root: as of `sockets`.
    """
    try:
        addresses = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").iterdir())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        numbers = [int(one) for one in visible.split(",")] if visible else range(len(addresses))
        address = addresses[numbers[index]].lower()
        return _numbers((root / f"sys/bus/pci/devices/{address}/local_cpulist").read_text())
    except (OSError, ValueError, IndexError):
        return set()


def _numbers(text: str) -> set[int]:
    """Read a list of processors, such as `0-31,64-95`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def pin_to_socket(process: int, *, on_cpu: bool, root: Path = ROOT) -> tuple[int, set[int]]:
    """Let all threads of this process, and those that they start, run on one socket alone.

    It is the socket near the GPU of the process; without one, processes take sockets in turn.

    Args:
        process: its number among those of this machine.
        on_cpu: whether it computes on the CPU.
        root: as of `sockets`.

    Returns:
        The number of the socket, and its processors.

    Raises:
        ArbError: the system cannot do so, or has one socket.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ArbError("threads cannot be pinned on this system", hint="leave `--pin` out")
    known = sockets(root)
    if len(known) < 2:
        raise ArbError(
            "this process may only use one socket",
            hint="leave `--pin` out",
        )
    near = set() if on_cpu else near_gpu(process, root)
    turn = sorted(known)[process % len(known)]
    chosen = max(known, key=lambda number: (len(known[number] & near), number == turn))
    for thread in (ROOT / "proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), known[chosen])
    return chosen, known[chosen]

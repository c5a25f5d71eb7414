"""Threads are kept on one socket where there are several."""

import os
import threading

import pytest

from arbcli import sockets
from arbcli.errors import ArbError

GPUS = ("0000:18:00.0", "0000:3a:00.0", "0000:9b:00.0")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two sockets of two processors, three GPUs, and an affinity that nobody feels."""
    for cpu, number in enumerate((0, 0, 1, 1)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{number}\n")
    for address, near in zip(GPUS, ("0-1", "0,1", "2-3"), strict=True):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(f"{near}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.update({thread: cpus}))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pinned: dict[int, set[int]] = {}
    return tmp_path, pinned


@pytest.mark.parametrize(("process", "number"), [(0, 0), (1, 1), (2, 0)])
def test_processes_take_sockets_in_turn(process, number, machine):
    root, pinned = machine
    cpus = {2 * number, 2 * number + 1}
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    assert sockets.pin_to_socket(process, on_cpu=True, root=root) == (number, cpus)
    stop.set()
    assert {os.getpid(), other.native_id} <= pinned.keys()
    assert all(found == cpus for found in pinned.values())


@pytest.mark.parametrize(
    ("process", "visible", "number"),
    [(0, "", 0), (1, "", 0), (2, "", 1), (0, "2", 1), (1, "GPU-12,GPU-34", 1), (7, "", 1)],
)
def test_process_takes_the_socket_of_its_gpu(process, visible, number, machine, monkeypatch):
    root, _ = machine
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sockets.pin_to_socket(process, on_cpu=False, root=root)[0] == number


def test_one_socket_is_refused(machine, monkeypatch):
    root, pinned = machine
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ArbError, match="one socket"):
        sockets.pin_to_socket(0, on_cpu=True, root=root)
    assert not pinned


def test_system_that_pins_nothing_is_refused(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(ArbError, match="pins no threads"):
        sockets.pin_to_socket(0, on_cpu=True)

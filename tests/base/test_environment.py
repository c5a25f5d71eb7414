"""Settings before torch loads, sockets of processes, and the end of a program by a signal."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from arbcli import __main__, cli
from arbcli.base import environment, sockets
from arbcli.base.environment import set_environment, set_spins
from arbcli.base.signals import HANGUP, STOPPING, Interrupted, RaisedSignal, RecordedSignal


@pytest.fixture
def empty(monkeypatch) -> dict[str, str]:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    return environment


@pytest.mark.parametrize(("others", "yields", "spins"), [(0, True, 0), (2, True, 1), (2, False, 0)])
def test_threads_spin_less_next_to_other_programs(others, yields, spins, empty, monkeypatch):
    monkeypatch.setattr(environment, "count_busy_processors", lambda: others)
    set_environment(spins=False)
    assert empty["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "GOMP_SPINCOUNT" not in empty
    for set_before in (None, "7"):
        empty |= {"GOMP_SPINCOUNT": set_before} if set_before else {}
        set_spins(yields=yields)
        assert empty["GOMP_SPINCOUNT"] == (set_before or environment.SPINS[bool(spins)])


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


@pytest.mark.parametrize(
    ("process", "visible", "number"),
    [(0, "", 0), (1, "", 0), (2, "", 1), (0, "2", 1), (1, "GPU-12,GPU-34", 1), (7, "", 1)],
)
def test_process_takes_the_socket_of_its_gpu(process, visible, number, machine, monkeypatch):
    root, _ = machine
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sockets.pin_to_socket(process, uses_cpu=False, root=root)[0] == number


def fail_on_signal(number: int, _frame: object) -> None:
    pytest.fail(f"nobody listened to {signal.Signals(number).name}")


@pytest.fixture
def set_before() -> Iterator[Callable]:
    """Yield a setter of handlers, and restore all afterwards; a test may begin with one ignored."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        signal.signal(number, fail_on_signal)
    yield signal.signal
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_reaches_the_previous_handler(number, set_before):
    came = []
    set_before(number, lambda *_: came.append("second"))
    with RecordedSignal() as remembered:
        signal.raise_signal(number)
        assert remembered.received == number
        assert came == []
        signal.raise_signal(number)
        assert came == ["second"]


@pytest.mark.parametrize("number", STOPPING)
def test_signal_is_raised_by_its_name(number, set_before):
    with pytest.raises(Interrupted) as caught, RaisedSignal():
        signal.raise_signal(number)
    assert caught.value.name == signal.Signals(number).name
    assert not isinstance(caught.value, Exception)
    assert [signal.getsignal(each) for each in STOPPING] == [fail_on_signal] * len(STOPPING)


@pytest.mark.parametrize("before", [fail_on_signal, signal.SIG_DFL])
def test_hangup_that_comes_twice_has_no_effect_of_its_own(before, set_before):
    """A terminal that is closed sends more than one."""
    set_before(HANGUP, before)
    with RecordedSignal() as remembered:
        signal.raise_signal(HANGUP)
        assert signal.getsignal(HANGUP) == signal.SIG_IGN
        signal.raise_signal(HANGUP)
    assert remembered.received == HANGUP
    assert signal.getsignal(HANGUP) == before


@pytest.mark.parametrize("listener", [RecordedSignal, RaisedSignal])
def test_hangup_that_is_ignored_is_not_listened_to(listener, set_before):
    """As `nohup` has it; the others are listened to all the same."""
    set_before(HANGUP, signal.SIG_IGN)
    with listener():
        assert signal.getsignal(HANGUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, fail_on_signal)
        for _ in range(2):
            signal.raise_signal(HANGUP)
    assert signal.getsignal(HANGUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == fail_on_signal


@pytest.mark.parametrize("ignored", STOPPING)
def test_program_handles_signals_that_are_not_ignored_from_its_start(
    ignored, set_before, monkeypatch
):
    """As `nohup` ignores a SIGHUP, and a shell the SIGINT of what it runs in the background."""
    seen = {}
    recorder = lambda: seen.update({n: signal.getsignal(n) for n in STOPPING})  # noqa: E731
    monkeypatch.setattr(cli, "main", recorder)
    set_before(ignored, signal.SIG_IGN)
    __main__.main()
    assert seen == {n: signal.SIG_IGN if n == ignored else __main__._stop for n in STOPPING}


LOADING = """
import importlib.abc, os, signal, sys
class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Stop())
sys.argv = ["arb", "count-params"]
import runpy
runpy.run_module("arbcli", run_name="__main__")
"""


def test_signal_while_the_program_is_loaded_ends_it_in_a_line():
    command = [sys.executable, "-c", LOADING]
    # as from a terminal, though the tests may run where a signal is ignored
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=heard)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: stopped by SIGINT")

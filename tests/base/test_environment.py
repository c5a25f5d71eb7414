"""Settings before torch loads, sockets of processes, and the end of a program by a signal."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch

from arbcli import __main__, cli
from arbcli.base import caches as cached_files
from arbcli.base import environment, sockets
from arbcli.base.environment import (
    free_threads,
    keep_compiled_modules,
    set_environment,
    trains_twin,
)
from arbcli.base.errors import ArbError
from arbcli.base.signals import (
    HANGUP,
    STOPPING,
    Interrupted,
    RaisedSignal,
    RememberedSignal,
    exit_code,
)
from arbcli.commands import train
from arbcli.config.presets import preset
from arbcli.config.training import trains_ternary
from arbcli.training.parallel.process import Place

LINES = {
    "train --ctx 64": False, "train --weights ternary": False, "train --weights float": True,
    "train --ctx 64 --weights ste --optimizer muon": True, "train --weights=float --ctx 64": True,
    "train --weights float --weights ternary": False, "train --weights": False,
    "generate --prompt float": False, "": False,
}  # fmt: skip


@pytest.fixture
def empty(monkeypatch) -> dict[str, str]:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    return environment


@pytest.mark.parametrize("line", LINES)
def test_threads_of_a_twin_spin_as_libgomp_has_it(line, empty):
    assert trains_twin(line.split()) == LINES[line]
    set_environment(line.split())
    assert ("GOMP_SPINCOUNT" in empty) != LINES[line]
    assert empty["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_saved_float_twin_is_recognised():
    twin = preset("tiny", weights="float")
    found = {weights: trains_ternary(twin, weights) for weights in (None, "ste", "ternary")}
    assert found == {None: False, "ste": False, "ternary": True}
    assert trains_ternary("tiny", None)


def test_variables_of_the_user_stay(empty):
    empty["GOMP_SPINCOUNT"] = "7"
    set_environment(["train"])
    assert empty["GOMP_SPINCOUNT"] == "7"


@pytest.fixture
def torch_folder(tmp_path, monkeypatch):
    """A package named torch without compiled modules."""
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    source = folder / "__init__.py"
    source.write_text("")
    found = mock.Mock(origin=str(source))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: found)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return folder


@pytest.mark.parametrize("why", ["no room", "no bytecode"])
def test_modules_that_nothing_keeps_compiled_are_kept_in_the_cache(
    why, torch_folder, tmp_path, monkeypatch
):
    if why == "no room":
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keep_compiled_modules()
    assert sys.pycache_prefix == str(tmp_path / "cache" / "arb" / "modules")
    assert (tmp_path / "cache" / "arb" / "modules").stat().st_mode & 0o777 == 0o700
    assert not sys.dont_write_bytecode
    show = "import sys; print(sys.pycache_prefix, sys.dont_write_bytecode)"
    child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)
    assert child.stdout.split() == [sys.pycache_prefix, "False"]


@pytest.mark.parametrize(
    "why",
    [
        "compiled",
        "room",
        "no torch",
        "no cache",
        "foreign cache",
        "imported",
    ],
)
def test_modules_are_not_kept_in_the_cache_otherwise(why, torch_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", why != "room")
    if why == "compiled":
        compiled = torch_folder / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
        compiled.parent.mkdir()
        compiled.write_bytes(b"")
    elif why == "no torch":
        monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    elif why == "imported":
        monkeypatch.setitem(sys.modules, "torch", torch)
    elif why == "no cache":
        (tmp_path / "cache").write_text("a file")
    elif why == "foreign cache":
        monkeypatch.setattr(cached_files, "_is_own", lambda _: False)
    keep_compiled_modules()
    assert sys.pycache_prefix is None
    assert sys.dont_write_bytecode == (why != "room")
    assert os.environ["PYTHONPYCACHEPREFIX"] == ""


def test_compiled_modules_stay_where_the_user_has_them(torch_folder, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", "elsewhere")
    keep_compiled_modules()
    assert sys.pycache_prefix == "elsewhere"


COUNTS = "cpu  1 2 3\nprocs_running {}\nprocs_blocked 0\n"


@pytest.mark.parametrize(
    ("line", "running", "spins"),
    [("train", (2, 3, 2), "2000"), ("train", (2, 1), "12000"), ("train", ("",), "12000"),
     ("train --weights float", (2,), None), ("generate", (), "12000"), ("", (), "12000")],
)  # fmt: skip
def test_threads_spin_less_next_to_other_programs(line, running, spins, empty, monkeypatch):
    counts = iter(running)
    file = mock.Mock(read_text=lambda: COUNTS.format(next(counts)) if running != ("",) else "cpu")
    monkeypatch.setattr(environment, "COUNTS", file)
    set_environment(line.split())
    assert empty.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    ("threads", "processors", "running", "chosen"),
    [(2, 2, 2, 1), (2, 2, 1, 2), (2, 2, 3, 2), (4, 4, 3, 2), (4, 4, 4, 4), (16, 16, 2, 15),
     (4, 16, 9, 4), (1, 2, 2, 1)],
)  # fmt: skip
def test_busy_processors_are_left_to_others_unless_most_are(
    threads, processors, running, chosen, empty, monkeypatch
):
    file = mock.Mock(read_text=lambda: COUNTS.format(running))
    monkeypatch.setattr(environment, "COUNTS", file)
    monkeypatch.setattr(environment, "LOOK_SECONDS", 0)
    assert free_threads(threads, processors) == chosen
    empty["OMP_NUM_THREADS"] = str(threads)
    assert free_threads(threads, processors) == threads


def test_program_that_runs_now_and_then_keeps_no_processor(empty, monkeypatch):
    counts = iter([2] * 19 + [1])
    file = mock.Mock(read_text=lambda: COUNTS.format(next(counts)))
    monkeypatch.setattr(environment, "COUNTS", file)
    monkeypatch.setattr(environment, "LOOK_SECONDS", 0)
    assert free_threads(2, 2) == 2
    assert next(counts, None) is None


@pytest.mark.parametrize(
    ("device", "gpu", "chosen"),
    [(None, False, 3), ("cpu", True, 3), (None, True, 7), ("cuda", True, 7)],
)
def test_run_on_a_cpu_reports_its_threads(device, gpu, chosen, monkeypatch):
    now, said = [7], mock.Mock()
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(train, "free_threads", lambda threads, processors: 3)
    train._leave_busy_processors(device, said)
    assert now[-1] == chosen
    line = "other programs are running: computing with 3 of 7 threads"
    assert said.noted.mock_calls == [mock.call(line)] * (chosen == 3)


def test_system_without_counts_is_taken_to_be_quiet(empty, monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "COUNTS", tmp_path / "none")
    set_environment(["train"])
    assert empty["GOMP_SPINCOUNT"] == "12000"


@pytest.mark.parametrize(
    ("weights", "spins"), [("ternary", ("2000", "12000")), ("float", ("None",))]
)
def test_program_sets_it_by_its_command_line(weights, spins):
    code = (
        "import os, sys\n"
        "import arbcli.cli as cli\n"
        f"sys.argv = ['arb', 'train', '--weights', '{weights}', '--help']\n"
        "try: cli.main()\n"
        "finally: print(os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    environment = {key: os.environ[key] for key in os.environ if key != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] in spins


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
    with pytest.raises(ArbError, match="needs several sockets"):
        sockets.pin_to_socket(0, on_cpu=True, root=root)
    assert not pinned


def test_system_that_pins_nothing_is_refused(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(ArbError, match="does not support pinning"):
        sockets.pin_to_socket(0, on_cpu=True)


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


@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 129), ("SIGINT", 130), ("SIGTERM", 143)])
def test_exit_code_is_that_of_the_signal(name, code):
    assert exit_code(name) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_reaches_the_previous_handler(number, set_before):
    came = []
    set_before(number, lambda *_: came.append("second"))
    with RememberedSignal() as remembered:
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
    with RememberedSignal() as remembered:
        signal.raise_signal(HANGUP)
        assert signal.getsignal(HANGUP) == signal.SIG_IGN
        signal.raise_signal(HANGUP)
    assert remembered.received == HANGUP
    assert signal.getsignal(HANGUP) == before


@pytest.mark.parametrize("listener", [RememberedSignal, RaisedSignal])
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_other_signals_are_listened_to_though_they_were_ignored(number, set_before):
    """A shell ignores the SIGINT of what it runs in the background, which `kill` may send."""
    set_before(number, signal.SIG_IGN)
    with RememberedSignal() as remembered:
        signal.raise_signal(number)
    assert remembered.received == number
    assert signal.getsignal(number) == signal.SIG_IGN


def test_hangup_that_is_ignored_stays_so_after_another_signal(set_before):
    set_before(HANGUP, signal.SIG_IGN)
    with RememberedSignal() as remembered:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(HANGUP)
        assert signal.getsignal(HANGUP) == signal.SIG_IGN
    assert remembered.received == signal.SIGTERM
    assert signal.getsignal(HANGUP) == signal.SIG_IGN


@pytest.mark.parametrize("ignored", STOPPING)
def test_program_handles_signals_that_are_not_ignored_from_its_start(
    ignored, set_before, monkeypatch
):
    """As `nohup` ignores a SIGHUP, and a shell the SIGINT of what it runs in the background."""
    seen = {}
    found = lambda: seen.update({n: signal.getsignal(n) for n in STOPPING})  # noqa: E731
    monkeypatch.setattr(cli, "main", found)
    set_before(ignored, signal.SIG_IGN)
    __main__.main()
    assert seen == {n: signal.SIG_IGN if n == ignored else __main__._stop for n in STOPPING}


@pytest.mark.parametrize("number", STOPPING)
def test_program_that_is_still_loaded_is_ended_with_a_line(number, monkeypatch, capfd):
    ended = mock.Mock(side_effect=SystemExit)  # as it does not return
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit):
        __main__._stop(number, None)
    assert ended.call_args.args == (3,)
    name = signal.Signals(number).name
    assert capfd.readouterr() == ("", f"error: stopped by {name}, with nothing saved\n")


LOADING = """
import importlib.abc, os, signal, sys
class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            signal.raise_signal({number})
sys.meta_path.insert(0, Stop())
sys.argv = ["arb", "count-params"]
import runpy
runpy.run_module("arbcli", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "arbcli.cli"), (signal.SIGTERM, "typer"), (signal.SIGINT, "torch")],
)
def test_signal_while_the_program_is_loaded_ends_it_in_a_line(number, name):
    code = LOADING.format(name=name, number=int(number))
    command = [sys.executable, "-c", code]
    # as from a terminal, though the tests may run where a signal is ignored
    heard = partial(signal.signal, number, signal.SIG_DFL)
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=heard)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: stopped by {signal.Signals(number).name}")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_command_pins_the_place_that_a_process_has(rank, device, monkeypatch):
    pinned, said = mock.Mock(return_value=(3, {4, 5})), mock.Mock()
    monkeypatch.setattr(train, "pin_to_socket", pinned)
    monkeypatch.setattr(train, "this_process", lambda: Place(rank, 2, rank + 7))
    monkeypatch.setattr(train, "note", said)
    train._pin(device)
    assert pinned.mock_calls == [mock.call(rank + 7, on_cpu=device == "cpu")]
    line = "threads stay on socket 3, on 2 processors"
    assert said.mock_calls == [mock.call(line)] * (rank == 0)

"""Processes of a run on this machine: what each is told, and how they end together."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until

from arbcli.base.errors import ArbError
from arbcli.base.signals import Interrupted
from arbcli.training.parallel import launch as launching
from arbcli.training.parallel.group import CPU, joined
from arbcli.training.parallel.launch import Failure, launch
from arbcli.training.parallel.process import STORE, ProcessRank, this_process

STARTED = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
TORCHRUN = STARTED | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def script(text: str) -> list[str]:
    """Make a command that runs a Python script, which knows `rank` and can `wait`."""
    begin = "import json, os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    begin += "def wait():\n    while True: time.sleep(0.01)\n"
    return [sys.executable, "-S", "-c", begin + text]


def wait_for(*paths: Path) -> None:
    wait_until(lambda: all(path.exists() for path in paths))


def test_processes_get_their_places_and_a_private_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    told = "import stat\nfolder = pathlib.Path(os.environ['ARB_STORE']).parent\n"
    told += "mode = oct(stat.S_IMODE(folder.stat().st_mode))\n"
    told += "leads = os.getsid(0) == os.getpid()\n"
    told += "about = json.dumps([dict(os.environ), mode, leads])\n"
    told += "pathlib.Path(sys.argv[1], str(rank)).write_text(about)"
    assert launch([*script(told), str(tmp_path)], 3) is None
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    ranks = [ProcessRank(rank, 3, rank, True) for rank in range(3)]
    assert [this_process(about) for about, *_ in told] == ranks
    assert {(mode, leads) for _, mode, leads in told} == {("0o700", True)}
    assert {about["OMP_NUM_THREADS"] for about, *_ in told} == {"1"}
    (store,) = {about[STORE] for about, *_ in told}
    assert not Path(store).parent.exists()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # a user's own
    assert launch(script("sys.exit(os.environ['OMP_NUM_THREADS'] != '5')"), 1) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("RANK", "4"), ("RANK", "-1"), ("RANK", "x"), ("RANK", ""), ("RANK", "9" * 5000),
     ("WORLD_SIZE", "0"), ("WORLD_SIZE", "\u0664"), ("LOCAL_RANK", "1.0"),
     ("MASTER_PORT", "port"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536")],
)  # fmt: skip
def test_place_that_is_not_a_number_is_refused(name, text):
    with pytest.raises(ArbError, match=f"the environment variable `{name}` is `{text}`"):
        this_process(TORCHRUN | {name: text})


@pytest.mark.parametrize("name", [name for name in TORCHRUN if name not in ("RANK", "WORLD_SIZE")])
def test_process_of_several_without_its_place_does_not_train_alone(name, monkeypatch):
    for other in TORCHRUN.keys() - {name}:
        monkeypatch.setenv(other, TORCHRUN[other])
    with (
        pytest.raises(ArbError, match=f"`WORLD_SIZE` is 4, without `{name}`"),
        joined(CPU, "train"),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("os.kill(os.getpid(), 9) if rank == 1 else wait()", Failure(1, -9)),
        ("signal.signal(15, signal.SIG_IGN); sys.exit(4) if rank == 0 else wait()", Failure(0, 4)),
    ],
)
def test_first_failure_ends_all_and_is_returned(text, failure, monkeypatch):
    monkeypatch.setattr(launching, "TERMINATE_SECONDS", 0.1)
    monkeypatch.setattr(launching, "KILL_SECONDS", 0.5)
    assert launch(script(text), 3) == failure


DRIVER = """
import sys
from arbcli.base.signals import Interrupted, RaisedSignal
from arbcli.training.parallel.launch import launch
try:
    with RaisedSignal():
        failure = launch(sys.argv[1:], 2)
except Interrupted as stopped:
    sys.exit(stopped.name)
sys.exit(failure and failure.code)
"""
LISTENING = """
got = []
def receive(number, frame):
    got.append(number)
    here.with_suffix(".got").touch()
signal.signal(int(sys.argv[2]), receive)
here = pathlib.Path(sys.argv[1], str(rank))
here.with_suffix(".new").write_text(str(os.getpid()))
here.with_suffix(".new").rename(here)
while not pathlib.Path(sys.argv[1], "end").exists(): time.sleep(0.01)
sys.exit(10 + len(got) if rank == 0 else 0)
"""


@pytest.fixture
def launched(tmp_path):
    """Start a `launch` of two that wait until there is a file `end`; stop all when it is over."""
    started = []

    def start(number: int) -> subprocess.Popen:
        command = [sys.executable, "-c", DRIVER, *script(LISTENING), str(tmp_path), str(number)]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        wait_for(tmp_path / "0", tmp_path / "1")
        return started[0]

    yield start
    (tmp_path / "end").touch()
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(folder: Path) -> list[int]:
    return [int((folder / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signal_is_handed_on_once_and_all_may_take_their_time(number, launched, tmp_path):
    process = launched(number)
    process.send_signal(number)
    wait_for(tmp_path / "0.got", tmp_path / "1.got")
    (tmp_path / "end").touch()
    assert process.wait() == 11


def test_second_signal_ends_all_at_once(launched, tmp_path):
    process = launched(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "0.got", tmp_path / "1.got")
    process.send_signal(signal.SIGINT)
    line, name = process.communicate()[1].splitlines()
    assert line.startswith("stopping by SIGTERM: processes finish the step and save")
    assert name == "SIGINT"
    assert not any(map(is_alive, pids(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="what ends them is of Linux")
def test_launcher_that_is_killed_leaves_no_process(launched, tmp_path):
    process = launched(signal.SIGTERM)
    assert all(map(is_alive, pids(tmp_path)))
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, pids(tmp_path))))


def test_signal_during_the_start_ends_the_started_processes(monkeypatch):
    started, start = [], launching._start

    def interrupted(*given):
        if started:
            raise Interrupted("SIGINT")
        started.append(start(*given))
        return started[0]

    monkeypatch.setattr(launching, "_start", interrupted)
    with pytest.raises(Interrupted):
        launch(script("wait()"), 2)
    assert started[0].returncode == -signal.SIGKILL

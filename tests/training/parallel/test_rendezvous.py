"""Where processes meet: some come, some do not, and some are about to do something else."""

import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from unittest import mock

import pytest
from processes import environment, run_processes

import arbcli
from arbcli.base.errors import ArbError
from arbcli.base.signals import Interrupted, RaisedSignal
from arbcli.training.parallel import rendezvous
from arbcli.training.parallel.group import CPU, joined
from arbcli.training.parallel.process import STORE, ProcessRank
from arbcli.training.parallel.rendezvous import WAIT, fingerprint, source_digest, wait_for_all


@pytest.fixture(params=["file", "address"])
def place(request, tmp_path):
    """Say in the environment where processes meet: threads of this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = environment(0, 1, server.getsockname()[1])
    if request.param == "file":
        where = {STORE: str(tmp_path / "store")}
    with mock.patch.dict(os.environ, where | {WAIT: "20"}):
        yield request.param


def outcomes(commands: dict[int, str], size: int) -> list[str]:
    """Have processes meet, by rank; return what each was told."""
    stores = []

    def come(rank: int) -> str:
        try:
            process = ProcessRank(rank, size, rank)
            stores.append(wait_for_all(process, commands[rank]))  # held until all are told
        except ArbError as error:
            return f"{error}; {error.hint}"
        return "met"

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(come, commands)]


@pytest.mark.parametrize("size", [2, 4])
def test_processes_of_one_program_meet(size, place):
    assert outcomes(dict.fromkeys(range(size), "train"), size) == ["met"] * size


def late_store(process: ProcessRank, seconds: int, open_store=rendezvous._open_store):
    """Open a store; process 0 looks before process 2 has come, which reads the outcome late."""
    store, looks = open_store(process, seconds), []

    def check(keys):
        if keys == ["program-2"] and process.rank != 1 and not looks:
            looks.append(store.wait([rendezvous.OUTCOME]))
            time.sleep(process.rank / 4)
            return process.rank == 2
        return store.check(keys)

    names = ("set_timeout", "set", "get", "add", "compare_set")
    return SimpleNamespace(check=check, **{name: getattr(store, name) for name in names})


@pytest.mark.parametrize("name", fingerprint("train"))
def test_process_of_another_program_is_refused_by_all(name, place, monkeypatch):
    monkeypatch.setattr(rendezvous, "fingerprint", lambda b: fingerprint("train") | {name: b})
    monkeypatch.setattr(rendezvous, "READ_SECONDS", 30)  # only until all have read it
    if name == "command":
        monkeypatch.setattr(rendezvous, "_open_store", late_store)
    began = time.monotonic()
    told = outcomes({0: "a", 1: "a", 2: "b"}, 3)
    assert time.monotonic() - began < 30
    expected = f"process 2 has another {name} than process 0: `b`, and not `a`; start all of them"
    assert [text.startswith(expected) for text in told] == [True] * 3


def test_process_that_never_comes_is_named_by_all(place, monkeypatch):
    monkeypatch.setenv(WAIT, "1")
    told = outcomes({0: "train", 2: "train"}, 4)
    expected = "of 4 processes these did not join within 1 s: 1, 3; start all of them together, or"
    assert [text.startswith(f"{expected} set `{WAIT}`") for text in told] == [True] * 2


@pytest.mark.parametrize("taken", [True, False])
def test_port_of_another_program_is_refused_by_all(taken, monkeypatch):
    """That program takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not taken:
            server.close()
        monkeypatch.setenv(WAIT, "1")
        with mock.patch.dict(os.environ, environment(0, 2, port)):
            told = outcomes({0: "train", 1: "train"} if taken else {1: "train"}, 2)
    if taken:
        assert told.pop(0).startswith(
            f"process 0 cannot listen at `127.0.0.1:{port}`: Address already in use; set `MASTER_"
        )
    assert told[0].startswith(f"process 0 does not answer at the rendezvous `127.0.0.1:{port}`")


def connected(rank: int) -> str:
    """Join the others; process 1 ends once all have met."""
    with mock.patch.dict(os.environ, {WAIT: "2"}):
        if rank == 1:
            wait_for_all(ProcessRank(1, 2, 1), "train")
            return "left"
        with pytest.raises(ArbError) as refused, joined(CPU, "train"):
            pass
        return f"{refused.value}; {refused.value.hint}"


def test_process_that_ends_once_all_have_met_is_missed_in_time():
    waited, left = run_processes(2, connected, join=False)
    assert left == "left"
    assert waited.startswith("another process of the run ended, or does not connect within 2 s; st")


def test_signal_ends_a_process_that_waits_for_others():
    timer = Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    with RaisedSignal():
        timer.start()
        with pytest.raises(Interrupted):
            rendezvous.call_with_timeout(60, Event().wait)


def test_every_source_is_in_the_digest(tmp_path):
    package = tmp_path / "package"
    without_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(arbcli.__file__).parent, package, ignore=without_cache)
    assert source_digest(package) == source_digest()
    assert fingerprint("train")["digest of arb's sources"] == source_digest()[:16]
    seen = {source_digest()}
    for name in ("__init__.py", "model/rules/moment.py", "kernels/runtime/native.c"):
        path = package / name
        path.write_bytes(path.read_bytes().swapcase())
        assert source_digest(package) not in seen
        seen.add(source_digest(package))
    (package / "cli.py").rename(package / "clj.py")
    assert source_digest(package) not in seen

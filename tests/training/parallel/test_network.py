"""`arb train --gpus N` as it runs: nobody from outside reaches it, and a signal ends it well."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from apparatus.killing import processes_of, start
from marks import on_gpus
from network import listening_addresses, outside

from arbcli.training.parallel.rendezvous import INTERFACES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
SHAPE = "--dim 32 --layers 1 --heads 2 --ffn 48 --ctx 16 --batch 2 --accum 4 --steps 1000000"
LONGEST = 600
"""Seconds; a command that hangs shall not hang all."""


@pytest.fixture(
    params=[
        (2, "cpu"),
        pytest.param((4, "cpu"), marks=pytest.mark.slow),
        *(pytest.param((size, "cuda"), marks=on_gpus(size)) for size in (2, 4)),
    ]
)
def running(request, text, tmp_path, monkeypatch):
    """Start a run of several processes; yield the command and its directory when it has begun.

    The environment asks for sockets at an interface that others reach. Where no process can have
    used CUDA, all are forked from this one: to load torch in three takes most of the time.
    """
    size, device = request.param
    run, log = tmp_path / "run", tmp_path / "log"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if there := outside():
        for name in INTERFACES:
            monkeypatch.setenv(name, there[0])
    words = [*SHAPE.split(), "--data", text, "--out", str(run), "--quiet", "--device", device]
    words = ["train", "--gpus", str(size), *words, "--log-every", "1"]
    if torch.cuda.is_available():
        with log.open("w") as said:
            command = [sys.executable, "-m", "arbcli", *words]
            process = subprocess.Popen(command, stdout=said, stderr=said)
        pid = process.pid
    else:
        monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # whose descriptor is the log's there
        monkeypatch.setattr(sys, "stderr", sys.__stderr__)
        pid = start(words, "kept", log)
    until = time.monotonic() + LONGEST
    while not (run / "metrics.jsonl").exists():  # made with the first record
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), log.read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    yield pid, run, size, log
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_processes_listen_on_loopback_alone_and_end_by_a_signal(running, tmp_path):
    pid, run, size, log = running
    _, *workers = processes_of(pid)
    assert len(workers) == size
    sockets = listening_addresses([pid, *workers])
    assert sockets  # else the scan sees nothing
    assert all(address.is_loopback for address, _ in sockets)
    if there := outside():
        for _, port in sockets:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((there[1], port), timeout=LONGEST)
    (folder,) = tmp_path.glob("arb-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    messages = log.read_text()
    assert messages.count("stopped by SIGTERM after step") == 1
    assert "error" not in messages
    last = max(run.glob("step-*.safetensors"))
    assert f"after step {int(last.stem[5:])}\n" in messages
    assert f"arb train --resume {run} --gpus {size}\n" in messages
    assert not folder.exists()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)

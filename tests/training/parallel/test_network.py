"""`arb train --gpus N` as it runs: nobody from outside reaches it, and a signal ends it well."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
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
def running(request, text, tmp_path):
    """Start a run of several processes; yield the command and its directory when it has begun.

    The environment asks for sockets at an interface that others reach.
    """
    size, device = request.param
    run, about = tmp_path / "run", {"TMPDIR": str(tmp_path)}
    if there := outside():
        about |= dict.fromkeys(INTERFACES, there[0])
    words = [*SHAPE.split(), "--data", text, "--out", str(run), "--quiet", "--device", device]
    command = [sys.executable, "-m", "arbcli", "train", "--gpus", str(size), *words]
    with subprocess.Popen(
        command, env=os.environ | about, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + LONGEST
        while not (run / "metrics.jsonl").exists():  # made with the first record
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield process, run, size
        process.kill()


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_processes_listen_on_loopback_alone_and_end_by_a_signal(running, tmp_path):
    process, run, size = running
    workers = children(process.pid)
    assert len(workers) == size
    found = listening_addresses([process.pid, *workers])
    assert found  # else the scan sees nothing
    assert all(address.is_loopback for address, _ in found)
    if there := outside():
        for _, port in found:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((there[1], port), timeout=LONGEST)
    (folder,) = tmp_path.glob("arb-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=LONGEST)
    assert (process.returncode, output) == (143, "")
    assert errors.count("stopped by SIGTERM after step") == 1
    assert "error" not in errors
    last = max(run.glob("step-*.safetensors"))
    assert f"after step {int(last.stem[5:])}\n" in errors
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)

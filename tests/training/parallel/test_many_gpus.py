"""Runs on several GPUs give the bits of one, captured or not; the command ends, and goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from marks import on_gpus
from processes import run_processes

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import EAGER_STEPS, deterministic
from arbcli.model.checkpoint import tensor_digest
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

SHAPE = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 32, "batch": 2, "accum": 4}
STEPS = EAGER_STEPS + 3
SIZES = [pytest.param(size, marks=on_gpus(size)) for size in (2, 4)]
TIMEOUT = 600
"""Seconds; a command that hangs shall not hang all."""
ENDED_WITHIN = 30
"""Seconds from the end of one process to that of all."""


def trained(group, text, given, capture):
    """Train on the GPU of this process; return digests of the state, and the losses."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place = f"cuda:{torch.cuda.current_device()}"
    texts = open_texts((str(text),), (), seed=3, context=32)
    about = SHAPE | given | {"steps": 9, "seed": 3, "reduce_dtype": "int12", "device": place}
    with deterministic():
        trainer = Trainer(new_config(**about), texts, group=group, capture=capture)
        losses = [float(trainer.train_step()) for _ in range(STEPS)]
        trainer.check_agreement()
        saved = trainer.checkpoint("text")
    trainer.release_graph()
    return {name: tensor_digest(name, part) for name, part in saved.tensors.items()}, losses


@pytest.mark.parametrize(
    ("given", "capture"),
    [({}, False), ({}, True), ({"digits": "all"}, True)],
    ids=["eager", "captured", "all digits"],
)
@pytest.mark.parametrize("size", SIZES)
def test_gpus_give_the_bits_of_a_single_gpu(size, given, capture, lines):
    (alone,) = run_processes(1, trained, lines, given, False, device="cuda")
    results = run_processes(size, trained, lines, given, capture, device="cuda")
    assert results[0] == alone
    assert {tuple(losses) for _, losses in results} == {tuple(alone[1])}


@pytest.mark.parametrize("size", SIZES)
def test_graph_on_gpus_gives_the_bits_of_a_single_gpu(size, lines, small_graph):
    given = small_graph | {"accum": 4, "memgram": True}
    (alone,) = run_processes(1, trained, lines, given, False, device="cuda")
    assert run_processes(size, trained, lines, given, False, device="cuda")[0] == alone


each_size = pytest.mark.parametrize(
    ("size", "device"),
    [
        pytest.param(2, "cpu", marks=pytest.mark.slow),
        *(pytest.param(size, "cuda", marks=on_gpus(size)) for size in (2, 4)),
    ],
)


def arb(*words: str) -> None:
    command = [sys.executable, "-m", "arbcli", "train", "--quiet", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-2000:]


@each_size
def test_command_ends_and_its_run_goes_on_with_another_number(size, device, lines, tmp_path):
    shape = [word for name, value in SHAPE.items() for word in (f"--{name}", value)]
    about = [*shape, "--data", lines, "--steps", 12, "--save-every", 6, "--keep", 3, "--seed", 3]
    about += ["--device", device, "--reduce-dtype", "int12"]
    one, many, back, forth = (tmp_path / name for name in ("one", "many", "back", "forth"))
    arb(*about, "--out", one)
    arb(*about, "--out", many, "--gpus", size)
    for source, target in ((many, back), (one, forth)):
        target.mkdir()
        for name in ("config.json", "step-000006.safetensors"):
            shutil.copy(source / name, target / name)
        (target / "metrics.jsonl").touch()
    arb("--resume", back)
    arb("--resume", forth, "--gpus", size)
    last = "step-000012.safetensors"
    assert len({(run / last).read_bytes() for run in (one, many, back, forth)}) == 1


def children(pid: int) -> list[int]:
    """List the processes that a launcher has started, by rank."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@each_size
@pytest.mark.parametrize("killed", [1, 0, "launcher"])
def test_command_ends_when_one_process_is_killed(killed, size, device, lines, tmp_path):
    """The others are waiting for its messages, in a captured step on a GPU."""
    shape = [str(word) for name, value in SHAPE.items() for word in (f"--{name}", value)]
    about = [*shape, "--data", str(lines), "--steps", "1000000", "--log-every", "1", "--no-save"]
    about += ["--device", device, "--gpus", str(size), "--json"]
    log = tmp_path / "log"
    with log.open("w") as said:
        command = [sys.executable, "-m", "arbcli", "train", *about]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
    try:
        for line in launcher.stdout:
            if json.loads(line).get("step", 0) > EAGER_STEPS + 20:
                break
        started = children(launcher.pid)
        assert len(started) == size, log.read_text()
        began = time.monotonic()
        os.kill(launcher.pid if killed == "launcher" else started[killed], signal.SIGKILL)
        launcher.stdout.read()  # until the last process that could write has ended
        code = launcher.wait(TIMEOUT)
    finally:
        launcher.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() - began < ENDED_WITHIN
        time.sleep(0.05)
    seconds = time.monotonic() - began
    sys.stdout.write(f"ended {seconds:.1f} s after process {killed} of {size} on {device}\n")
    sys.stdout.write(log.read_text())
    assert seconds < ENDED_WITHIN
    if killed == "launcher":
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + signal.SIGKILL
        assert f"process {killed} was ended by SIGKILL" in log.read_text()

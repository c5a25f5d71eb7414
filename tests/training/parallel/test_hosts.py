"""Two machines with two processes each: the bytes of one process, and what a fault leads to."""

import json
import os
import re
import shutil
import signal
import time
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest
import torch
from apparatus.hosts import LONGEST, Machines, can_make_machines, machines
from apparatus.killing import start
from made_runs import train
from processes import wait_until

from arbcli.training import sample
from arbcli.training.trainer import Trainer

SHAPE = {"dim": 16, "layers": 1, "heads": 2, "ffn": 24, "ctx": 8, "batch": 1, "accum": 4}
PLAN = {"steps": 12, "save_every": 2, "log_every": 2, "eval_every": 12, "device": "cpu"}
NEW = ["train", "--data", "text.txt", "--out", "run", "--quiet"]
NEW += [f"--{name.replace('_', '-')}={value}" for name, value in (SHAPE | PLAN).items()]
RESUME = ["train", "--resume", "run", "--quiet"]
QUICK = {"ARB_LOST_SECONDS": "2", "ARB_JOIN_SECONDS": "60"}
TEXT = b"ternary weights learn to read. " * 100
LAST = "run/step-000012.safetensors"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Evaluate and sample little."""
    if torch.cuda.is_available():
        pytest.skip("a process that may have used CUDA cannot be forked")
    evaluate = Trainer.evaluate
    less = mock.patch.object(Trainer, "evaluate", lambda trainer: evaluate(trainer, 2))
    with less, mock.patch.object(sample, "SAMPLE_BYTES", 1):
        yield


@pytest.fixture
def pair(tmp_path):
    """Make two machines with the text; they share no folder."""
    if not can_make_machines():
        pytest.skip("needs root, `ip` and network namespaces")
    with machines(tmp_path) as pair:
        for name in pair.spaces:
            (pair.home(name) / "text.txt").write_bytes(TEXT)
        yield pair


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Train in this process, from which others are forked; return the SHA-256 of the checkpoint."""
    run = train(tmp_path_factory.mktemp("alone"), TEXT, **SHAPE, **PLAN, reduce_dtype="int16")
    return digest(run.parent / LAST)


def finish_alone(pair: Machines) -> str:
    """Resume on machine `a` in one process; return the SHA-256 of the last checkpoint."""
    last = json.loads((pair.home("a") / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] < 12
    log = pair.folder / "resumed.log"
    pid = start(RESUME, "kept", log, lambda: os.chdir(pair.home("a")))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, log.read_text()
    return digest(pair.home("a") / LAST)


def finish_on_both(pair: Machines) -> str:
    """Resume on both machines, from a copy on `b`; return the SHA-256 of the last checkpoint."""
    shutil.copytree(pair.home("a") / "run", pair.home("b") / "run")
    for name in pair.spaces:
        pair.start(name, *RESUME)
    for name in pair.spaces:
        codes, logs = pair.wait(name)
        assert codes == [0, 0], logs
    return digest(pair.home("a") / LAST)


def errors(text: str) -> list[str]:
    return re.findall("^error: (.*)$", text, re.MULTILINE)


SILENT = (
    r"the run ended: no answer for \d s from (the machine of )?process {} on `{}`( and 1 more)?"
)


@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_machines_that_remain_name_the_lost_one_and_the_run_resumes(fault, pair, expected):
    for name in pair.spaces:
        pair.start(name, *NEW, **QUICK)
    path = pair.home("a") / "run" / "metrics.jsonl"
    wait_until(lambda: path.exists() and b"\n" in path.read_bytes(), LONGEST)
    if fault == "cut":
        pair.cut()
    else:
        pair.send("b", signal.SIGKILL)
    began = time.monotonic()
    codes, logs = pair.wait("a")
    assert time.monotonic() - began < 60
    assert codes == [2, 2]
    lines = [line for log in logs for line in errors(log)]
    assert len(lines) == 2, logs
    assert all(re.fullmatch(SILENT.format("[23]", "b"), line) for line in lines), lines
    codes, logs = pair.wait("b")
    assert codes == [-9, -9] if fault == "killed" else [2, 2]
    if fault == "cut":
        lines = [line for log in logs for line in errors(log)]
        assert len(lines) == 2, logs
        assert all(re.fullmatch(SILENT.format("0", "a"), line) for line in lines), lines
    assert [path.name for path in pair.home("b").iterdir()] == ["text.txt"]
    assert (finish_on_both if fault == "killed" else finish_alone)(pair) == expected


def test_failure_of_one_machine_is_said_by_the_other(pair):
    (pair.home("b") / "text.txt").write_bytes(b"short")
    for name in pair.spaces:
        pair.start(name, *NEW, **QUICK)
    (codes, logs), (codes_b, logs_b) = map(pair.wait, pair.spaces)
    assert codes == codes_b == [2, 2]
    said = {line for log in logs_b for line in errors(log)}
    told = [re.sub("process [23] on", "process N on", line) for log in logs for line in errors(log)]
    expected = [f"the run ended: process N on `b` failed: {line}" for line in said]
    assert told == 2 * expected
    assert len(said) == 1

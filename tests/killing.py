"""Runs that are killed over and over, with nobody left to read what they say; a script.

Every process is forked from one that has loaded everything, so that a hundred take minutes.
"""

import os
import random
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path

import torch

from arbcli import cli
from arbcli.run_files import checkpoints
from arbcli.train import run as run_module

STEPS = 120
SIZES = ["--dim", "16", "--layers", "1", "--heads", "1", "--ffn", "16", "--ctx", "8"]
OPTIONS = [*SIZES, "--batch", "2", "--steps", str(STEPS), "--save-every", "7", "--device", "cpu"]
KILLS_OF_A_RUN = 5
LONGEST_LIFE = 2.0
"""Seconds; a run that is left alone takes somewhat longer."""
SIGNALS = (signal.SIGKILL,) * 5 + (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
OUTPUTS = ("kept", "pipe", "full", "closed")


def break_output(how: str, log: Path) -> None:
    """Give this process the standard streams that a user gave it."""
    if how == "pipe":  # `arb train --json | head -1`
        reader, target = os.pipe()
        os.close(reader)
    elif how == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        if how == "closed":
            os.close(descriptor)
        else:
            os.dup2(target, descriptor)


def start(words: list[str], how: str, log: Path) -> int:
    """Fork a process that runs `arb` with these words, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        break_output(how, log)
        sys.argv = ["arb", *words]
        cli.main()
    except SystemExit as stopped:
        os._exit(stopped.code or 0)
    finally:
        os._exit(99)


def go_on(run: Path, text: Path, draw: random.Random, log: Path) -> int:
    """Start a run, or resume it, and return the id of its process."""
    begun = (run / "config.json").exists()
    words = ["--resume", str(run)] if begun else ["--data", str(text), *OPTIONS, "--out", str(run)]
    how = draw.choice(OUTPUTS)
    if how == "pipe":
        words.append("--json")
    return start(["train", *words], how, log)


def kill_runs(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill runs so many times in all, let each end at last, and count their last files by digest.

    Raises:
        AssertionError: a run that was left alone did not end well.
    """
    torch.set_num_threads(1)  # threads do not survive a fork
    run_module.SAMPLE_BYTES = 1
    text = folder / "text.txt"
    text.write_bytes(b"ternary weights learn to read, and to be killed. " * 200)
    draw, digests, killed, number = random.Random(seed), {}, 0, 0
    while killed < kills:
        number += 1
        run, log, of_run = folder / f"run{number}", folder / f"log{number}", 0
        while True:
            pid, left_alone = go_on(run, text, draw, log), of_run == KILLS_OF_A_RUN
            if not left_alone:
                time.sleep(draw.uniform(0, LONGEST_LIFE))
                os.kill(pid, draw.choice(SIGNALS))
                of_run += 1
            _, status = os.waitpid(pid, 0)
            if left_alone:
                assert os.waitstatus_to_exitcode(status) == 0, (run, status, log.read_text())
                break
        killed += of_run
        newest = checkpoints(run)[0]
        assert newest.name == f"step-{STEPS:06d}.safetensors", newest
        digest = sha256(newest.read_bytes()).hexdigest()
        digests[digest] = digests.get(digest, 0) + 1
    return digests


if __name__ == "__main__":
    found = kill_runs(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(f"{found}\n")
    sys.exit(len(found) != 1)

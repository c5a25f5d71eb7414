"""Runs that are killed over and over, with nobody left to read what they say; a script.

Every process is forked from one that has loaded everything, so that a hundred take minutes.
"""

import json
import os
import random
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path

import torch
from cells import Cell
from graph_parts import graph_config

from arbcli import cli
from arbcli.config.model_file import model_lines
from arbcli.run_files import checkpoints
from arbcli.train import run as run_module
from arbcli.train.record import METRICS

STEPS = 120
PLAN = (
    f"--batch 2 --steps {STEPS} --save-every 7 --eval-every 5 --keep-best --log-every 3"
    " --accum 2 --wire int12 --device cpu"
)
MODELS = {
    "dense": Cell("attention", "mlp", 1, "plain").model(),
    "chunks": Cell("latent", "none", 1, "chunked").model(),
    "compressed": Cell("compressed", "mlp", 1, "plain").model(),
    "streams": Cell("mamba", "experts", 4, "plain").model(),
    "grouped": Cell("grouped", "experts", 1, "chunked").model(),
    "graph": graph_config(),
}
"""Small models of each kind."""
TIMINGS = ("seconds", "bytes_per_second", "seconds_left", "mfu", "peak_bytes")
"""Fields of a record that differ from run to run."""
TORCH_FORKED = "Invalid thread pool!"
"""What torch sometimes says in a process that was forked, rarely; it is tried again."""
KILLS_OF_A_RUN = 5
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


def go_on(run: Path, text: Path, options: str, how: str, log: Path) -> int:
    """Start a run, or resume it, and return the id of its process."""
    begun = (run / "config.json").exists()
    new = ["--data", str(text), *options.split(), "--out", str(run)]
    words = ["--resume", str(run)] if begun else new
    if "--gpus" in options and begun:
        words += ["--gpus", options.partition("--gpus ")[2]]
    if how == "pipe":
        words.append("--json")
    return start(["train", *words], how, log)


def records(run: Path) -> list[dict]:
    """Read the records of a run, without what differs from run to run."""
    lines = (json.loads(line) for line in (run / METRICS).read_text().splitlines())
    return [{key: v for key, v in line.items() if key not in TIMINGS} for line in lines]


def contents(run: Path, *, with_records: bool) -> str:
    """Hash the last and the best checkpoint of a run, and its records.

    Raises:
        AssertionError: the run has not ended, or has no best checkpoint.
    """
    newest, (best,) = checkpoints(run)[0], run.glob("best-*.safetensors")
    assert newest.name == f"step-{STEPS:06d}.safetensors", newest
    digest = sha256(newest.read_bytes() + best.name.encode() + best.read_bytes())
    digest.update(json.dumps(records(run)).encode() if with_records else b"")
    return digest.hexdigest()


def kill_runs(folder: Path, kills: int, seed: int, options: str) -> None:
    """Kill runs so many times in all, let each end at last, and compare all with one left alone.

    A run that is only ever killed by SIGKILL has its records too; one that was asked to stop
    recorded that.

    Raises:
        AssertionError: a run ends otherwise.
    """
    torch.set_num_threads(1)  # threads do not survive a fork
    run_module.SAMPLE_BYTES = 1
    text = folder / "text.txt"
    text.write_bytes(b"ternary weights learn to read, and to be killed. " * 200)
    draw, killed, number, seconds = random.Random(seed), 0, 0, 0.0
    while killed < kills or not number:
        run, log, of_run = folder / f"run{number}", folder / f"log{number}", 0
        signals = SIGNALS if number % 2 == 0 else (signal.SIGKILL,)
        while True:
            left_alone = number == 0 or of_run == KILLS_OF_A_RUN
            how, began = "kept" if left_alone else draw.choice(OUTPUTS), time.monotonic()
            pid = go_on(run, text, options, how, log)
            if not left_alone:
                time.sleep(draw.uniform(0, seconds))
                os.kill(pid, draw.choice(signals))
                of_run += 1
            _, status = os.waitpid(pid, 0)
            if left_alone and TORCH_FORKED not in log.read_text():
                assert os.waitstatus_to_exitcode(status) == 0, (run, status, log.read_text())
                break
        seconds = seconds or time.monotonic() - began
        killed += of_run
        for with_records in (False, number % 2 == 1):
            wanted = contents(folder / "run0", with_records=with_records)
            assert contents(run, with_records=with_records) == wanted, run
        number += 1
    sys.stdout.write(f"{killed} kills of {number - 1} runs\n")


if __name__ == "__main__":
    place, kills, seed, name, *more = sys.argv[1:]
    model = Path(place) / "model.toml"
    model.write_text("\n".join(model_lines(MODELS[name])))
    kill_runs(Path(place), int(kills), int(seed), " ".join([f"--model {model}", PLAN, *more]))

"""Runs that are killed over and over, with nobody left to read their output.

Every process is forked from one that has loaded everything, the workers of a launcher too, so that
200 kills take minutes. A run that may be shared out resumes with another number of processes each
time.
"""

import gzip
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch
from cells import Cell
from graph_parts import graph_config
from made_runs import read_records

from arbcli import cli
from arbcli.base.run_files import checkpoints
from arbcli.config.model import ModelConfig
from arbcli.config.model_file import model_lines
from arbcli.config.presets import preset
from arbcli.training.parallel import launch

STEPS = 24
PLAN = f"--steps {STEPS} --save-every 7 --eval-every 5 --log-every 3 --device cpu"
ALONE, SHARED = "--batch 2", "--batch 1 --accum 4 --reduce-dtype int12"
"""Micro-batches of a run in one process, and of one that 1, 2 or 4 processes share."""
PROCESSES = (1, 2, 4)
DENSE = {"dim": 16, "layers": 2, "heads": 2, "ffn": 24, "ctx": 8}
TOKENS = "--preset tiny --dim 16 --layers 1 --heads 1 --ffn 16 --ctx 8 --tokenizer TOKENIZER"


def dense(**options: str) -> ModelConfig:
    return preset("tiny", **DENSE, **options)


RUNS: dict[str, tuple[ModelConfig | None, str]] = {
    "moment": (dense(digits="all", direction="factored"), SHARED),
    "nibble": (dense(rule="nibble", digits="fade"), SHARED),
    "votes": (dense(rule="votes"), f"{ALONE} --recompute"),
    "graph": (graph_config(), SHARED),
    "chunks": (Cell("mamba", "experts", 4, "chunked").model(), SHARED),
    "compressed": (Cell("compressed", "mlp", 1, "plain").model(), SHARED),
    "tokens": (None, f"{SHARED} {TOKENS}"),
    "mixture": (dense(), f"{ALONE} --data MIXED:2 --field text --sample-every 4 --keep 1"),
}
"""A model, unless options choose it, and options; `test_cells.py` resumes models of all parts."""
KILLS_OF_A_RUN = 5
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
OUTPUTS = ("kept", "pipe", "full", "closed")
TEXT = b"ternary weights learn to read, and to be killed. " * 200


class Forked:
    """A process as `subprocess.Popen` has it, forked from this one.

    Args:
        words: arguments of `arb`.
        variables: of its environment.
    """

    def __init__(self, words: list[str], variables: dict[str, str]) -> None:
        parent, self.returncode = os.getpid(), None
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        if sys.platform == "linux":
            launch._end_with(parent, launch.ctypes.CDLL(None).prctl)
        os.environ |= variables
        run_arb(words)

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_arb(words: list[str]) -> None:
    """Run `arb` in this forked process, and end it."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # else the first threads race to make torch's pool after a fork
    sys.argv = ["arb", *words]
    try:
        cli.main()
    except SystemExit as stopped:
        os._exit(stopped.code or 0)
    finally:
        os._exit(99)


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


def start(words: list[str], how: str, log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a process that runs `arb` with these words, after `prepare`, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # and not those of pytest
    prepare()
    launch._start = lambda command, variables: Forked(
        command[command.index("arbcli") + 1 :], variables
    )
    break_output(how, log)
    run_arb(words)


def go_on(run: Path, options: list[str], processes: int, how: str, log: Path) -> int:
    """Start a run, or resume it, and return the id of its process."""
    begun = (run / "config.json").exists()
    words = ["--resume", str(run)] if begun else [*options, "--out", str(run)]
    words += ["--gpus", str(processes)] if processes > 1 else []
    words += ["--device", "cpu"] if begun else []
    return start(["train", *words, *(["--json"] if how == "pipe" else [])], how, log)


def processes_of(pid: int) -> list[int]:
    """List a process and its children; none of one that has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *map(int, children)]


def contents(run: Path) -> dict[str, object]:
    """Hash the last and the best checkpoint of a run, if one is kept, and read its records.

    Raises:
        AssertionError: the run has not ended, or left a temporary file.
    """
    newest, best = checkpoints(run)[0], [*run.glob("best-*.safetensors")]
    assert newest.name == f"step-{STEPS:06d}.safetensors", newest
    assert not [*run.glob(".*.tmp")], run
    files = {path.name: sha256(path.read_bytes()).hexdigest() for path in (newest, *best)}
    entries = [
        {name: value for name, value in entry.items() if name != "state_bytes"}
        for entry in read_records(run)
    ]
    for entry in entries:
        # traffic is that of the last step of these processes: none before their first
        entry["gauges"].pop("wire", None)
    return files | {"records": entries}


def options_of(name: str, folder: Path) -> list[str]:
    """List the options of a kind of run, and write the files that they name."""
    config, options = RUNS[name]
    fades = config is not None and config.digits == "fade"
    words = [*options.split(), *PLAN.split(), *([] if fades else ["--keep-best"])]
    if config is not None:
        (folder / "model.toml").write_text("\n".join(model_lines(config)))
        words += ["--model", str(folder / "model.toml")]
    (folder / "text.txt").write_bytes(TEXT)
    mixed = "MIXED:2" in words
    words += ["--data", str(folder / "text.txt") + ":1" * mixed]
    if mixed:
        lines = b"".join(b'{"text": "records of %d are read"}\n' % n for n in range(200))
        (folder / "mixed.jsonl.gz").write_bytes(gzip.compress(lines))
        words[words.index("MIXED:2")] = f"{folder / 'mixed.jsonl.gz'}:2"
    if "TOKENIZER" in words:
        write_tokenizer(folder / "tokenizer.json")
        words[words.index("TOKENIZER")] = str(folder / "tokenizer.json")
    return words


def write_tokenizer(path: Path, special: tuple[str, ...] = (), text: str = TEXT.decode()) -> None:
    """Train a small tokenizer of bytes on a text."""
    import tokenizers

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, show_progress=False, special_tokens=[*special]
    )
    trained.train_from_iterator([text], trainer)
    trained.save(str(path))


def kill_run(
    run: Path, options: list[str], kills: int, draw: random.Random, seconds: dict[int, float]
) -> int:
    """Kill a run so many times, then let it end; return how often it was alive to be killed.

    Args:
        run: its directory.
        options: of the run.
        kills: how many.
        draw: chooses times, signals, outputs and processes.
        seconds: that a whole run takes, by the number of processes.

    Raises:
        AssertionError: it does not end well, or a process outlives its launcher.
    """
    log, killed = run.with_suffix(".log"), 0
    while killed < kills:
        processes = draw.choice([*seconds])
        pid = go_on(run, options, processes, draw.choice(OUTPUTS), log)
        time.sleep(draw.uniform(0, seconds[processes]))
        alive = processes_of(pid)
        if alive:
            os.kill(draw.choice(alive), draw.choice(SIGNALS))
            killed += 1
        os.waitpid(pid, 0)
        until = time.monotonic() + 5
        while any(Path(f"/proc/{child}").exists() for child in alive):
            assert time.monotonic() < until, f"{run}: a process outlived its launcher"
            time.sleep(0.01)
        if checkpoints(run)[:1] and checkpoints(run)[0].name == f"step-{STEPS:06d}.safetensors":
            break
    let_end(run, options, draw.choice([*seconds]))
    return killed


def let_end(run: Path, options: list[str], processes: int) -> float:
    """Start a run, or resume it, and wait for its end; return the seconds.

    Raises:
        AssertionError: it does not end well.
    """
    log, began = run.with_suffix(".log"), time.monotonic()
    _, status = os.waitpid(go_on(run, options, processes, "kept", log), 0)
    assert os.waitstatus_to_exitcode(status) == 0, (str(run), status, log.read_text()[-3000:])
    return time.monotonic() - began


def kill_runs(folder: Path, name: str, kills: int, seed: int) -> int:
    """Kill runs of one kind so many times in all, and compare all with one left alone.

    Raises:
        AssertionError: a run ends otherwise.
    """
    folder.mkdir()
    options, draw = options_of(name, folder), random.Random(seed)
    shared = PROCESSES if "--reduce-dtype" in options else (1,)
    whole = folder / "whole"
    seconds = {1: let_end(whole, options, 1)}
    seconds |= dict.fromkeys(shared[1:], 2 * seconds[1])
    expected, killed, number = contents(whole), 0, 0
    while killed < kills:
        run = folder / f"run{number}"
        killed += kill_run(run, options, min(kills - killed, KILLS_OF_A_RUN), draw, seconds)
        actual = contents(run)
        assert actual == expected, f"{run} differs from {whole}"
        number += 1
    return killed

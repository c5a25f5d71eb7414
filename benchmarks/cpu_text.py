"""Time text on a CPU beside llama.cpp with the same weights, in turns.

    python -m benchmarks.cpu_text [PRESET...] [--compute fp32] [--rounds N] [--out DIR]

The weights are random, without sub-norms, and exported to the smallest type of GGUF that holds
them: Q4_0 of trits, Q8_0 of all digits. Either program is a process of its own that waits while the
other one computes, with as many threads as there are cores. llama.cpp is that of the package
`xllamacpp`, as it is configured there, and its times are those that it reports itself. Set
`ARB_NATIVE_LEVEL=x86-64-v3` to let ours have no more than AVX2, which it was compiled for.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks import results

LENGTH, PROMPT = 128, 200
"""Bytes that are made after one byte, and bytes of a prompt."""
ROUNDS = 7
DIGITS = ("trit", "all")
TASKS = {"text": LENGTH, "prompt": PROMPT}
"""What is timed, and the bytes of it."""


def build(preset: str, digits: str, compute: str):
    """Make a model of random weights."""
    import torch

    from arbcli.config.presets import preset as configuration
    from arbcli.device import COMPUTE
    from arbcli.model.language_model import LanguageModel

    config = configuration(preset, sub_norms=False, digits=digits)
    with torch.no_grad():
        model = LanguageModel(config, COMPUTE[compute])
        model.initialise(0)
        model.drop_training_state()
    return model


def export(preset: str, digits: str, path: Path) -> str:
    """Write such a model for llama.cpp; returns the type of its matrices."""
    from arbcli.export.gguf import write_model

    source = SimpleNamespace(step=0)
    weights = SimpleNamespace(
        model=build(preset, digits, "fp32"), checkpoint=source, origin="random weights"
    )
    return write_model(path, weights, preset, None).name


def serve_ours(preset: str, digits: str, compute: str) -> None:
    """Do what each line that comes in says, and answer with its seconds."""
    from arbcli.infer.generation import Decoder, Sampling

    model = build(preset, digits, compute)
    with model.prepared_weights():
        decoder = Decoder(model, PROMPT + LENGTH, Sampling(temperature=0))
        print(flush=True)
        for line in sys.stdin:
            decoder.cache.reset()
            decoder.length = 0
            started = time.perf_counter()
            if line.strip() == "prompt":
                decoder.read(b"import " * 28 + b"arbs")
            else:
                decoder.read(b"\n")
                started = time.perf_counter()
                made = sum(map(len, decoder.stream(LENGTH)))
                assert made == LENGTH
            print(time.perf_counter() - started, flush=True)


def serve_llama(path: str) -> None:
    """Do the same with llama.cpp."""
    import xllamacpp

    about = xllamacpp.CommonParams()
    about.model.path, about.n_ctx, about.n_parallel = path, PROMPT + LENGTH, 1
    about.fit_params, about.verbosity = False, -1
    about.cpuparams.n_threads = about.cpuparams_batch.n_threads = os.cpu_count()
    server = xllamacpp.Server(about)
    print(flush=True)
    for line in sys.stdin:
        length = 1 if line.strip() == "prompt" else LENGTH
        prompt = list(b"import " * 28 + b"arbs") if length == 1 else [10]
        answer = server.handle_completions(
            {"prompt": prompt, "max_tokens": length, "temperature": 0, "cache_prompt": False}
            | {"ignore_eos": True, "logit_bias": [[ord("a"), 1e4]]}
        )
        found = answer["timings"]
        of_task, made = ("prompt", PROMPT) if length == 1 else ("predicted", LENGTH)
        assert found[f"{of_task}_n"] == made, json.dumps(found)
        print(found[f"{of_task}_ms"] / 1e3, flush=True)


def start(*words: str) -> subprocess.Popen:
    """Start a process that serves, and wait until it is ready."""
    command = [sys.executable, "-m", "benchmarks.cpu_text", "--serve", *words]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    if process.stdout.readline() != "\n":
        raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
    return process


def ask(process: subprocess.Popen, task: str) -> float:
    """Let a process do a task: bytes a second."""
    process.stdin.write(f"{task}\n")
    process.stdin.flush()
    return TASKS[task] / float(process.stdout.readline())


def measure(preset: str, digits: str, compute: str, rounds: int, folder: Path) -> list[dict]:
    """Measure a model in both programs, in turns."""
    path = folder / f"{preset}-{digits}.gguf"
    kind = export(preset, digits, path)
    processes = {
        "arb": start("arb", preset, digits, compute),
        "llama.cpp": start("llama", str(path)),
    }
    found = {(task, name): [] for task in TASKS for name in processes}
    try:
        for _ in range(1 + rounds):  # the first warms up
            for task in TASKS:
                for name, process in processes.items():
                    found[task, name].append(ask(process, task))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        path.unlink()
    rows, level = [], os.environ.get("ARB_NATIVE_LEVEL", "")
    for task in TASKS:
        for name in processes:
            rates = found[task, name][1:]
            rows.append(
                {
                    "preset": preset,
                    "digits": digits,
                    "task": task,
                    "program": name,
                    "type": kind if name == "llama.cpp" else compute,
                    "threads": os.cpu_count(),
                    "level": level,
                    "bytes_per_second": round(statistics.median(rates), 1),
                    "rounds_bytes_per_second": [round(rate, 1) for rate in rates],
                }
            )
        pairs = zip(found[task, "arb"][1:], found[task, "llama.cpp"][1:], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        ours, theirs = (row["bytes_per_second"] for row in rows[-2:])
        print(
            f"{preset} {digits} {task}: {ours} bytes/s, llama.cpp {theirs}, {ratio:.2f}", flush=True
        )
    return rows


def main() -> None:
    """Print a line for each model and task, and write the rows."""
    if sys.argv[1:2] == ["--serve"]:
        _, _, program, *words = sys.argv
        (serve_ours if program == "arb" else serve_llama)(*words)
        return
    parser = results.options("cpu_text", "Time text on a CPU beside llama.cpp.")
    parser.add_argument("presets", nargs="*", default=["base"], metavar="PRESET")
    parser.add_argument("--compute", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for preset in given.presets:
            for digits in DIGITS:
                about = given.compute, given.rounds, Path(folder)
                rows += measure(preset, digits, *about)
    options = [*given.presets, "--compute", given.compute]
    results.save(
        "cpu_text", rows, command=results.command_line("cpu_text", *options), folder=given.out
    )


if __name__ == "__main__":
    main()

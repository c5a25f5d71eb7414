"""Time text on a CPU against llama.cpp with the same weights, in turns.

    python -m benchmarks.cpu_text [PRESET...] [--threads N] [--compute C] [--rounds N] [--out DIR]

The weights are random, without sub-norms, and exported to the smallest type of GGUF that holds
them: Q4_0 of trits, Q8_0 of all digits. Either program is a process of its own that waits while the
other one computes. llama.cpp is that of the package `xllamacpp`, as it is configured there. With
the time on the clock, which llama.cpp reports itself, stands that of the processor, of all threads:
with one thread other programs disturb it less. Set
`ARB_NATIVE_LEVEL=x86-64-v3` to let ours have no more than AVX2, which it was compiled for.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from arbcli.config.presets import preset as configuration
from benchmarks import results

if TYPE_CHECKING:
    from arbcli.model.language_model import LanguageModel

LENGTH, PROMPT = 128, 200
"""Bytes that are made after one byte, and bytes of a prompt."""
ROUNDS = 7
DIGITS = ("trit", "all")
TASKS = {"text": LENGTH, "prompt": PROMPT}
"""Tasks that are timed, and their bytes."""


def build(preset: str, digits: str, compute: str) -> "LanguageModel":
    """Make a model of random weights."""
    import torch

    from arbcli.kernels.runtime.device import COMPUTE
    from arbcli.model.language_model import LanguageModel

    config = configuration(preset, sub_norms=False, digits=digits)
    with torch.no_grad():
        model = LanguageModel(config, COMPUTE[compute])
        model.initialise(0)
        model.drop_training_state()
    return model


def export(preset: str, digits: str, path: Path) -> str:
    """Write such a model for llama.cpp; returns the type of its matrices."""
    from arbcli.generation.load import Weights
    from arbcli.interop.gguf.export import write_model
    from arbcli.model.checkpoint import Checkpoint

    about = Checkpoint(
        step=0, config={}, counters={}, data={"origin": "random weights"}, tensors={}
    )
    weights = Weights(build(preset, digits, "fp32"), about, path, "fp32")
    return write_model(path, weights, preset, None).name


def serve_ours(threads: str, preset: str, digits: str, compute: str) -> None:
    """Run the task of each line of stdin, and print its wall-clock and processor seconds."""
    import torch

    from arbcli.generation.decoder import Decoder
    from arbcli.generation.sampling import Sampling

    torch.set_num_threads(int(threads))
    model = build(preset, digits, compute)
    with model.prepared_weights():
        decoder, greedy = Decoder(model, PROMPT + LENGTH), Sampling(temperature=0)
        decoder.begin(b"\n", greedy)  # records the step
        print(flush=True)
        for line in sys.stdin:
            if line.strip() == "text":
                decoder.begin(b"\n", greedy)
            started, of_cpu = time.perf_counter(), time.process_time()
            if line.strip() == "prompt":
                decoder.begin(b"import " * 28 + b"arbs", greedy)
            else:
                assert sum(map(len, decoder.stream(LENGTH))) == LENGTH
            print(time.perf_counter() - started, time.process_time() - of_cpu, flush=True)


def serve_llama(threads: str, path: str) -> None:
    """Run the tasks of `serve_ours` with llama.cpp."""
    import xllamacpp

    about = xllamacpp.CommonParams()
    about.model.path, about.n_ctx, about.n_parallel = path, PROMPT + LENGTH, 1
    about.fit_params, about.verbosity = False, -1
    about.cpuparams.n_threads = about.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(about)
    print(flush=True)
    for line in sys.stdin:
        length = 1 if line.strip() == "prompt" else LENGTH
        prompt = list(b"import " * 28 + b"arbs") if length == 1 else [10]
        of_cpu = time.process_time()
        answer = server.handle_completions(
            {"prompt": prompt, "max_tokens": length, "temperature": 0, "cache_prompt": False}
            | {"ignore_eos": True, "logit_bias": [[ord("a"), 1e4]]}
        )
        timings = answer["timings"]
        of_task, length_made = ("prompt", PROMPT) if length == 1 else ("predicted", LENGTH)
        assert timings[f"{of_task}_n"] == length_made, json.dumps(timings)
        print(timings[f"{of_task}_ms"] / 1e3, time.process_time() - of_cpu, flush=True)


def start(*words: str) -> subprocess.Popen:
    """Start a process that serves, and wait until it is ready."""
    command = [sys.executable, "-m", "benchmarks.cpu_text", "--serve", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "\n":
        raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
    return process


def ask(process: subprocess.Popen, task: str) -> tuple[float, float]:
    """Run a task in a process; return bytes per second, and per second of the processor."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{task}\n")
    process.stdin.flush()
    clock, processor = map(float, process.stdout.readline().split())
    return TASKS[task] / clock, TASKS[task] / processor


def measure(preset: str, digits: str, args: argparse.Namespace, folder: Path) -> list[dict]:
    """Measure a model in both programs, in turns."""
    path, threads = folder / f"{preset}-{digits}.gguf", str(args.threads)
    kind = export(preset, digits, path)
    processes = {
        "arb": start("arb", threads, preset, digits, args.compute),
        "llama.cpp": start("llama", threads, str(path)),
    }
    all_rates: dict[tuple[str, str], list[tuple[float, float]]] = {
        (task, name): [] for task in TASKS for name in processes
    }
    try:
        for _ in range(1 + args.rounds):  # the first warms up
            for task in TASKS:
                for name, process in processes.items():
                    all_rates[task, name].append(ask(process, task))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        path.unlink()
    rows = []
    for (task, name), rates in all_rates.items():
        clock, processor = ([pair[i] for pair in rates[1:]] for i in (0, 1))
        rows.append(
            {
                "preset": preset,
                "digits": digits,
                "task": task,
                "program": name,
                "type": kind if name == "llama.cpp" else args.compute,
                "threads": args.threads,
                "level": os.environ.get("ARB_NATIVE_LEVEL", ""),
                "bytes_per_second": round(statistics.median(clock), 1),
                "rounds_bytes_per_second": [round(rate, 1) for rate in clock],
                "bytes_per_cpu_second": round(statistics.median(processor), 1),
                "rounds_bytes_per_cpu_second": [round(rate, 1) for rate in processor],
            }
        )
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        shown = ", ".join(
            f"{ours[name]} {what}, llama.cpp {theirs[name]}, {ratio(ours, theirs, name):.2f}"
            for name, what in (
                ("bytes_per_second", "bytes/s"),
                ("bytes_per_cpu_second", "bytes in a second of the processor"),
            )
        )
        print(f"{preset} {digits} {ours['task']}: {shown}", flush=True)
    return rows


def ratio(ours: dict, theirs: dict, name: str) -> float:
    """Return our relative speed: the median over rounds in turns."""
    pairs = zip(ours[f"rounds_{name}"], theirs[f"rounds_{name}"], strict=True)
    return statistics.median(mine / other for mine, other in pairs)


def main() -> None:
    """Print a line for each model and task, and write the rows."""
    if sys.argv[1:2] == ["--serve"]:
        _, _, program, *words = sys.argv
        (serve_ours if program == "arb" else serve_llama)(*words)
        return
    parser = results.options("cpu_text", "Time text on a CPU against llama.cpp.")
    parser.add_argument("presets", nargs="*", default=["base"], metavar="PRESET")
    parser.add_argument("--compute", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if short := [name for name in args.presets if configuration(name).ctx <= PROMPT]:
        parser.error(f"contexts of at most {PROMPT} bytes: {', '.join(short)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for preset in args.presets:
            for digits in DIGITS:
                rows += measure(preset, digits, args, Path(folder))
    options = [*args.presets, "--threads", str(args.threads), "--compute", args.compute]
    results.save(
        "cpu_text", rows, command=results.command_line("cpu_text", *options), folder=args.out
    )


if __name__ == "__main__":
    main()

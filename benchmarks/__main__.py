"""Run all benchmarks that this machine can: `make bench`.

    python -m benchmarks [--only PART...] [--out DIR] [--list]

A part is a benchmark, or `training_step.PRESET`, `generation.PRESET` and the like. Each is a
process of its own, so that none inherits another's memory or clocks, and one that fails stops no
other. `--list` also shows the benchmarks that need texts, checkpoints or several GPUs.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.results import FOLDER, load
from benchmarks.tables.rows import Runs

GPU_PARTS = {
    "training_step.tiny": 60,
    "training_step.small": 70,
    "training_step.base": 80,
    "training_step.1b": 240,
    "peaks.1b": 120,
    "step_budget": 180,
    "generation.small": 60,
    "generation.1b": 90,
    "several_texts.1b": 120,
    "products": 150,
    "arb_3b": 150,
    "hnet.hnet-small": 150,
    "hnet.hnet-base": 200,
    "families.hnet-base": 250,
    "families.arb-long": 250,
    "families.experts": 250,
}
"""Expected seconds on an H200, compilation included."""
CPU_PARTS = {"cpu_step": 240}
OTHERS = {
    "quality": "a run of `small` is 2,000 steps of 3 to 4 ms",
    "scaling": "some 320 s of steps",
    "frontier": "not noted",
    "shakespeare": "not noted",
    "tuning": "not noted",
    "ternary_tuning": "110 s, and 40 s for each row",
    "large_tuning": "100 s for three cases with `--at-once 3`",
    "checks": "not noted",
    "many_gpus": "not noted",
    "cpu_text": "not noted",
    "serving": "100 s for `1b`, 64 clients and a soak of 40 s",
    "plain_module": "210 s",
}
"""Benchmarks that need texts, runs or several GPUs, and their time on an H200 or on two cores."""
SHOWN = {
    "training_step": "speed and memory of a step against float AdamW and Muon",
    "peaks": "peak of a step, predicted and measured",
    "step_budget": "where a step's time goes, next to the least that it could take",
    "generation": "bytes per second of one text against a float decoder",
    "several_texts": "the same of several texts at once",
    "plain_module": "a plain module in integers against `arb train` and AdamW",
    "products": "packed products and updates against cuBLAS",
    "arb_3b": "arb-3b in 5,106 MiB against the largest float model that fits",
    "hnet": "chunked models against dense ones of their size",
    "families": "steps of chunks, long texts and experts against plain PyTorch",
    "cpu_step": "a step on a CPU against float AdamW",
    "quality": "held-out loss of options and seeds on one text",
    "scaling": "held-out loss of four sizes and four lengths",
    "frontier": "steps and peaks for the lowest loss within a memory",
    "shakespeare": "tiny Shakespeare against nanoGPT's recipe",
    "tuning": "tuning of an imported model against AdamW, Muon, LoRA and others",
    "ternary_tuning": "an imported model made ternary against straight-through latents",
    "large_tuning": "memory and speed of tuning at the shapes of Qwen3",
    "checks": "speculative decoding against a byte at a time",
    "many_gpus": "bits, speed and loss of several GPUs",
    "cpu_text": "text on a CPU against llama.cpp",
    "serving": "bytes per second of many clients against a batch, and clients that attack",
}
"""Content of each benchmark, by its name."""


def main() -> int:
    """Run the parts, and print what they found; 1 if any failed."""
    parts = GPU_PARTS if torch.cuda.is_available() else CPU_PARTS
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", nargs="+", metavar="PART", help="a part, or a benchmark")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument("--list", action="store_true", help="show all benchmarks and their time")
    args = parser.parse_args()
    every = GPU_PARTS | CPU_PARTS
    if args.list:
        print_list()
        return 0
    wanted = args.only or list(parts)
    chosen = [name for name in every if name in wanted or name.split(".")[0] in wanted]
    unknown = set(wanted) - {*every, *(name.split(".")[0] for name in every)}
    if unknown:
        parser.error(f"no part is named {', '.join(sorted(unknown))}: see --list")
    failed = []
    for name in chosen:
        print(f"\n== {name}", flush=True)
        module, *words = name.split(".", 1)
        command = [sys.executable, "-m", f"benchmarks.{module}", *words, "--out", str(args.out)]
        started = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        if code:
            failed.append(name)
        how = f"failed with {code}" if code else "done"
        print(f"== {name} {how} after {time.perf_counter() - started:.0f} s", flush=True)
    for name in dict.fromkeys(part.split(".")[0] for part in chosen):
        print(f"\n{name}")
        for line in _short_table(load(name, args.out)):
            print(f"  {line}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return bool(failed)


def print_list() -> None:
    """Print the content, the parts and the expected time of every benchmark."""
    for name, shown in SHOWN.items():
        print(f"{name}: {shown}")
        for part, seconds in (GPU_PARTS | CPU_PARTS).items():
            if part.split(".")[0] == name:
                where = "a CPU" if part in CPU_PARTS else "an H200"
                print(f"    {part}: about {seconds} s on {where}")
        if name in OTHERS:
            print(f"    python -m benchmarks.{name} --help; time: {OTHERS[name]}")


def _short_table(runs: Runs) -> list[str]:
    """Write the rows of any file as lines, leaving out what is long."""
    lines = []
    for run in runs:
        for row in run["rows"]:
            shown = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
            lines.append(", ".join(f"{key} {value}" for key, value in shown.items()))
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""Run all benchmarks that this machine can: `make bench`.

    python -m benchmarks [--only PART...] [--out DIR] [--list]

A part is a benchmark, or `training_step.PRESET`, `generation.PRESET` and the like. Each is a
process of its own, so that none inherits another's memory or clocks, and one that fails stops no
other.
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
    "digits": 60,
    "arb_3b": 240,
    "hnet.hnet-small": 150,
    "hnet.hnet-base": 200,
    "long": 60,
    "families.hnet-base": 250,
    "families.arb-long": 250,
    "families.experts": 250,
}
"""Seconds that each is thought to take on an H200, compilation included."""
CPU_PARTS = {"cpu_step": 240}


def main() -> int:
    """Run the parts, and print what they found; 1 if any failed."""
    parts = GPU_PARTS if torch.cuda.is_available() else CPU_PARTS
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", nargs="+", metavar="PART", help="a part, or a benchmark")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument("--list", action="store_true", help="show the parts and their seconds")
    args = parser.parse_args()
    every = GPU_PARTS | CPU_PARTS
    if args.list:
        for name, seconds in every.items():
            print(
                f"{name:20} about {seconds:4} s{'' if name in parts else ', not on this machine'}"
            )
        return 0
    wanted = args.only or list(parts)
    chosen = [name for name in every if name in wanted or name.split(".")[0] in wanted]
    unknown = set(wanted) - {*every, *(name.split(".")[0] for name in every)}
    if unknown:
        parser.error(f"no part is named {', '.join(sorted(unknown))}: see --list")
    failed = []
    for name in chosen:
        print(f"\n== {name}", flush=True)
        module, *words = name.split(".")
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

"""Run all benchmarks that this machine can: `make bench`.

    python -m benchmarks [--only PART...] [--out DIR] [--list]

A part is a benchmark, or `training_step.PRESET`, `generation.PRESET` and the like. Each is a
process of its own, so that none inherits another's memory or clocks, and one that fails stops no
other. `--list` also shows the programs that need texts, checkpoints or several GPUs.
"""

import argparse
import ast
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
    "ternary_tuning": "110 s, and 40 s for each row",
    "large_tuning": "100 s for three cases of few tokens with `--at-once 3`",
    "serving": "100 s for `1b` and 64 clients",
    "plain_module": "210 s",
}
"""Known times of benchmarks that need options, texts or runs, on an H200."""


def main() -> int:
    """Run the parts, and print what they found; 1 if any failed."""
    parts = GPU_PARTS if torch.cuda.is_available() else CPU_PARTS
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", nargs="+", metavar="PART", help="a part, or a benchmark")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument("--list", action="store_true", help="show all programs and their time")
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
    """Print the summary, the parts and the known times of every program of this folder."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        name, tree = path.stem, ast.parse(path.read_text())
        if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            continue
        print(f"{name}: {(ast.get_docstring(tree) or '').splitlines()[0]}")
        parts = GPU_PARTS | CPU_PARTS
        known = [part for part in parts if part.split(".")[0] == name]
        for part in known:
            where = "a CPU" if part in CPU_PARTS else "an H200"
            print(f"    {part}: about {parts[part]} s on {where}")
        if not known:
            duration = f": {OTHERS[name]}" if name in OTHERS else ""
            print(f"    python -m benchmarks.{name}{duration}")


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

"""Time the commands of the README as a user runs them, each a process of its own.

    python -m benchmarks.commands [--device DEVICE] [--out DIR]

Each runs twice: with empty caches, so that kernels are compiled, and again. Rows are written as
they come.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arbcli.data.opening import open_texts
from benchmarks import results

PART_BYTES = 100_000
"""Number of bytes of Python's source that `arb evaluate` reads."""
COMMANDS = {
    "arb train --ctx 64": ["train", "--ctx", "64"],
    'arb generate auto --prompt "import "': ["generate", "auto", "--prompt", "import "],
    "arb evaluate auto --data part.txt": ["evaluate", "auto", "--data", "part.txt"],
    "arb audit-memory --preset 1b --budget 16GiB": [
        "audit-memory", "--preset", "1b", "--budget", "16GiB",
    ],
}  # fmt: skip


def main() -> None:
    """Print a line for each command, and write the rows."""
    parser = results.options("commands", "Time the commands of the README.")
    parser.add_argument("--device", help="[default: the choice of each command]")
    args = parser.parse_args()
    out = args.out.resolve()
    device = ["--device", args.device] if args.device else []
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        write_part(Path(folder) / "part.txt")
        caches = {"XDG_CACHE_HOME": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        for again in (False, True):
            for command, words in COMMANDS.items():
                row = timed([*words, *device], Path(folder), caches)
                rows.append({"command": command, "again": again} | row)
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                line = results.command_line("commands")
                results.save("commands", rows, command=line, folder=out)


def write_part(path: Path) -> None:
    """Write the beginning of what `arb train` reads by default."""
    path.write_bytes(open_texts((), (), seed=0, context=64).train.read(0, PART_BYTES))


def timed(words: list[str], folder: Path, caches: dict[str, str]) -> dict:
    """Run a command: its seconds, those of processors, and the held-out loss if it has one."""
    root = str(Path(__file__).parents[1])
    environment = os.environ | caches | {"PYTHONPATH": root}
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "arbcli", *words, "--json"],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    after = os.times()
    if done.returncode not in (0, 1):  # 1 says that it does not fit
        sys.exit(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    used = sum(after[place] - before[place] for place in (2, 3))
    row = {"seconds": round(time.perf_counter() - began, 1), "processor_seconds": round(used, 1)}
    return row | {"val_loss": found.get("val_loss")}


if __name__ == "__main__":
    main()

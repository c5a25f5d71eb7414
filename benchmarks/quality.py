"""Train with several options and seeds on one text, and note the held-out loss of each.

    python -m benchmarks.quality --data TRAIN --val VAL [--seed N]... [--file code] OPTIONS...

Each of OPTIONS is one argument, such as "--rule moment --digits all": what follows `arb train
--preset small --ctx 256 --batch 32 --steps 2000`, or for `--file code`, a longer run on source
code, `--ctx 512 --batch 64 --steps 2500`.
"""

import json
import shlex
import tempfile
from pathlib import Path

from arbcli.cli import app
from benchmarks import results

COMMON = {
    "quality": "--preset small --ctx 256 --batch 32 --steps 2000",
    "code": "--preset small --ctx 512 --batch 64 --steps 2500",
}
"""Options of every run, by the file of results."""
DIGITS = {"trit": "ternary", "all": "all digits", "fade": "ternary"}
KINDS = {"float": "float", "ste": "straight-through"}
"""What tables call the weights of a twin."""


def measure(options: str, common: str, text: list[str], seed: int) -> dict:
    """Train once: what a row holds."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        given = ["train", *shlex.split(f"{common} {options}"), *text, "--seed", str(seed)]
        app([*given, "--out", str(run), "--quiet"], standalone_mode=False)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        config = json.loads((run / "config.json").read_text())["config"]
    weights = config["model"]["weights"]
    return {
        "preset": "small",
        "options": options,
        "kind": KINDS.get(weights, DIGITS[config["model"]["digits"]]),
        "seed": seed,
        "steps": last["step"],
        "held_out_nats": round(last["val_loss"], 4),
        "state_mib": round(last["state_bytes"] / 2**20, 1),
        "peak_mib": round(last["peak_bytes"] / 2**20, 1),
        "bytes_per_second": round(last["bytes_per_second"]),
    }


def main() -> None:
    """Write a row a run, as soon as it is there."""
    parser = results.options("quality", "Train with several options and seeds.")
    parser.add_argument("options", nargs="+", metavar="OPTIONS")
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--seed", type=int, action="append", help="[default: 0]")
    parser.add_argument("--file", choices=COMMON, default="quality")
    given = parser.parse_args()
    text = ["--data", given.data, "--val", given.val]
    for options in given.options:
        for seed in given.seed or [0]:
            row = measure(options, COMMON[given.file], text, seed)
            print(f"{options} seed {seed}: {row['held_out_nats']}", flush=True)
            command = f"arb train {COMMON[given.file]} --data {Path(given.data).stem.upper()}"
            results.save(given.file, [row], command=command, folder=given.out)


if __name__ == "__main__":
    main()

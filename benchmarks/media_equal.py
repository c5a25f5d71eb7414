"""Loss of sounds and pictures with ternary weights and with float ones, trained for equal times.

    python -m benchmarks.media_equal NAME=TRAIN,VAL ... [--steps N] [--out DIR]

A run of `PROBED` steps of each kind, alone on the GPU, gives its speed: the upper quartile of its
records, as a busy host only slows steps down. The float baseline then trains for as many steps as
take the time of `--steps` ternary ones. All runs train at once. Their held-out loss is that of
`arb train`, as no checkpoint of a float baseline is kept; `arb evaluate` adds bits a sample or a
pixel of the ternary models.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import results

SHAPE = ("--preset", "small", "--ctx", "4096", "--batch", "4")
WEIGHTS = {
    "ternary": ("--weights", "anneal"),
    "float": ("--weights", "float", "--optimizer", "muon", "--lr", "3e-3"),
}
PROBED = 150
POLL_SECONDS = 0.2
STEPS = 3500


def started(folder: Path, name: str, train: Path, val: Path, steps: int) -> subprocess.Popen:
    """Start a run in `folder`, whose kind is the last word of its name."""
    texts = ("--data", train, "--val", val, "--out", folder / name)
    often = ("--steps", steps, "--eval-every", steps, "--log-every", 10, "--quiet")
    words = [*SHAPE, *WEIGHTS[name.split()[-1]], *texts, *often]
    return subprocess.Popen([sys.executable, "-m", "arbcli", "train", *map(str, words)])


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read the records of a run."""
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]


def speed(found: list[dict[str, Any]]) -> float:
    """Return the upper quartile of the bytes a second of records."""
    rates = [record["bytes_per_second"] for record in found if record["bytes_per_second"]]
    return statistics.quantiles(rates, n=4)[-1]


def evaluated(run: Path) -> dict[str, float | int]:
    """Measure the bits a sample, or a pixel, of a run's held-out text."""
    command = [sys.executable, "-m", "arbcli", "evaluate", str(run), "--json", "--quiet"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    kind = next(kind for kind in report["by_kind"] if kind["units"])
    return {name: kind[name] for name in ("units", "bits_per_unit")}


def main() -> None:
    """Train, and print and write a row for each run as it ends."""
    parser = results.options("media_equal", __doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", metavar="NAME=TRAIN,VAL")
    parser.add_argument("--steps", type=int, default=STEPS, help="of ternary weights")
    parser.add_argument(
        "--rates", type=float, nargs=2, help="bytes a second of both kinds, if they are known"
    )
    parser.add_argument("--runs", type=Path, help="folder that keeps the ternary models")
    args = parser.parse_args()
    texts = {}
    for given in args.texts:
        name, _, paths = given.partition("=")
        texts[name] = [Path(path) for path in paths.split(",")]
    with tempfile.TemporaryDirectory() as place:
        folder, runs = args.runs or Path(place), {}
        rates = dict(zip(WEIGHTS, args.rates or (), strict=False))
        for kind in () if args.rates else WEIGHTS:
            train, val = next(iter(texts.values()))
            _wait(started(folder, f"probe {kind}", train, val, PROBED))
            rates[kind] = speed(records(folder, f"probe {kind}"))
        steps = {kind: round(args.steps * rate / rates["ternary"]) for kind, rate in rates.items()}
        print(json.dumps({"bytes_per_second": rates, "steps": steps}), flush=True)
        for name, (train, val) in texts.items():
            for kind in WEIGHTS:
                runs[name, kind] = started(folder, f"{name} {kind}", train, val, steps[kind])
        for (name, kind), run in _as_they_end(runs):
            if run.returncode:
                print(json.dumps({"text": name, "weights": kind, "failed": run.returncode}))
                continue
            last = records(folder, f"{name} {kind}")[-1]
            row = {"text": name, "weights": kind, "steps": steps[kind]}
            row |= {key: last[key] for key in ("val_loss", "state_bytes", "peak_bytes")}
            row["bytes_per_second"] = rates[kind]
            row |= {"units": None, "bits_per_unit": None}
            if kind == "ternary":
                row |= evaluated(folder / f"{name} {kind}")
            print(json.dumps(row), flush=True)
            command = results.command_line("media_equal", f"--steps {args.steps}")
            results.save("media_equal", [row], command=command, folder=args.out)


def _as_they_end(
    runs: dict[tuple[str, str], subprocess.Popen],
) -> Iterator[tuple[tuple[str, str], subprocess.Popen]]:
    """Yield each run with its key once it has ended."""
    left = dict(runs)
    while left:
        for key in [key for key, run in left.items() if run.poll() is not None]:
            yield key, left.pop(key)
        time.sleep(POLL_SECONDS)


def _wait(run: subprocess.Popen) -> None:
    if run.wait():
        raise SystemExit(f"a run ended with {run.returncode}")


if __name__ == "__main__":
    main()

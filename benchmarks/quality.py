"""Train with several options and seeds on one text, and note the held-out loss of each.

    python -m benchmarks.quality --data TRAIN --val VAL [--seed N]... [--file FILE] [--together N]
        OPTIONS...

Each of OPTIONS is one argument, such as "--rule moment --weights int8": what follows `arb train
--preset small --ctx 256 --batch 32 --steps 2000`, or for another `--file`, a longer run on source
code: see `COMMON`. With `--together` so many runs share the GPU, each with the bits that it has by
itself: see `benchmarks.together`. Their speed and peak are not known.
"""

import dataclasses
import itertools
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import typer.main

from arbcli.cli import app
from arbcli.commands._options import given_options
from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.together import train_together

COMMON = {
    "quality": "--preset small --ctx 256 --batch 32 --steps 2000",
    "code": "--preset small --ctx 512 --batch 64 --steps 2500",
    "code_base": "--preset base --ctx 512 --batch 64 --steps 3000",
}
"""Options of every run, by the file of results."""
CURVE = {"code_base": 500}
"""Steps between the losses that rows have besides the last one, by the file."""
DIGITS = {"trit": "ternary", "all": "all digits", "fade": "ternary"}
KINDS = {"float": "float", "ste": "straight-through"}
"""Names of the weights of a baseline in tables."""


def kind_of(model: dict) -> str:
    """Name the weights of a model in tables, by the fields of its configuration."""
    name = KINDS.get(model["weights"], DIGITS[model["digits"]])
    return "ternary blocks" if name == "ternary" and model.get("symbol_digits") else name


def measure(options: str, common: str, text: list[str], seed: int, every: int | None) -> dict:
    """Train once: what a row holds.

    With `every` it has `curve`: pairs of a number of steps, and the held-out loss after them.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["train", *shlex.split(f"{common} {options}"), *text, "--seed", str(seed)]
        words += ["--eval-every", str(every)] if every else []
        app([*words, "--out", str(run), "--quiet"], standalone_mode=False)
        records = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
        config = json.loads((run / "config.json").read_text())["config"]
    last = records[-1]
    if last["val_loss"] is None:
        raise SystemExit(f"{options} seed {seed}: stopped after step {last['step']}, so no row")
    losses = [(line["step"], line["val_loss"]) for line in records]
    curve = [[step, round(loss, 4)] for step, loss in losses if loss is not None]
    return {
        "preset": common.split()[1],
        "options": options,
        "kind": kind_of(config["model"]),
        "seed": seed,
        "steps": last["step"],
        "held_out_nats": round(last["val_loss"], 4),
        "state_mib": round(last["state_bytes"] / 2**20, 1),
        "peak_mib": round(last["peak_bytes"] / 2**20, 1),
        "bytes_per_second": round(last["bytes_per_second"]),
    } | ({"curve": curve} if every else {})


def trainer_of(options: str, common: str, text: list[str], seed: int) -> Trainer:
    """Make what trains by options of `arb train`."""
    words = ["train", *shlex.split(f"{common} {options}"), *text, "--seed", str(seed)]
    group: Any = typer.main.get_command(app)
    parent = group.make_context("arb", list(words))
    command = group.get_command(parent, "train")
    context = command.make_context("train", words[1:], parent=parent)
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name).name == "COMMANDLINE"
    }
    config = new_config(**given_options(**given))
    texts = open_texts(config.data, config.val, seed=seed, context=config.model.ctx)
    return Trainer(config, texts, capture=True)


def measure_together(
    runs: list[tuple[str, int]], common: str, text: list[str], every: int | None
) -> list[dict]:
    """Train several runs at once: rows as of `measure`, without speed and peak."""
    with deterministic():
        trainers = [trainer_of(options, common, text, seed) for options, seed in runs]
        curves = train_together(trainers, every)
    return [
        {
            "preset": common.split()[1],
            "options": options,
            "kind": kind_of(dataclasses.asdict(trainer.config.model)),
            "seed": seed,
            "steps": trainer.config.steps,
            "held_out_nats": round(curve[trainer.config.steps], 4),
            "state_mib": round(trainer.state_bytes() / 2**20, 1),
        }
        | ({"curve": [[step, round(loss, 4)] for step, loss in curve.items()]} if every else {})
        for (options, seed), trainer, curve in zip(runs, trainers, curves, strict=True)
    ]


def main() -> None:
    """Write a row a run, as soon as it is there."""
    parser = results.options("quality", "Train with several options and seeds.")
    parser.add_argument("options", nargs="+", metavar="OPTIONS")
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--seed", type=int, action="append", help="[default: 0]")
    parser.add_argument("--file", choices=COMMON, default="quality")
    parser.add_argument("--together", type=int, metavar="N")
    args = parser.parse_args()
    text_name = Path(args.data).stem.removesuffix("-train").upper()
    text, common = ["--data", args.data, "--val", args.val], COMMON[args.file]
    command = f"arb train {common} --data {text_name}"
    every = list(itertools.product(args.options, args.seed or [0]))
    at_once, curve = args.together or 1, CURVE.get(args.file)
    for begin in range(0, len(every), at_once):
        runs = every[begin : begin + at_once]
        if args.together:
            rows = measure_together(runs, common, text, curve)
        else:
            rows = [measure(options, common, text, seed, curve) for options, seed in runs]
        for row in rows:
            print(f"{row['options']} seed {row['seed']}: {row['held_out_nats']}", flush=True)
        results.save(args.file, rows, command=command, folder=args.out)


if __name__ == "__main__":
    main()

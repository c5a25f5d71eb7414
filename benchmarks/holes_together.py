"""Losses in holes of models of several seeds, which train at once on one GPU.

    python -m benchmarks.holes_together TRAIN VAL [--seeds N] [--steps N] [--out DIR]

For each seed a model of the next byte and one of `--objective fill` train for as many steps
(`benchmarks.together`), and are compared by `benchmarks.holes`, whose rows and file these are.
"""

import json
from pathlib import Path

from arbcli.data import Text
from arbcli.device import deterministic
from arbcli.kernels.runtime.backend import use_backend
from benchmarks import results
from benchmarks.holes import compare
from benchmarks.quality import trainer_of
from benchmarks.together import train_together

COMMON = "--preset small --steps {steps}"


def main() -> None:
    """Train the models, and print and write a row for each seed and length of a hole."""
    parser = results.options("holes_together", __doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("val", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--hole", type=int, nargs="+", default=[16, 64, 8])
    parser.add_argument("--windows", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    files = ["--data", str(args.data), "--val", str(args.val)]
    common = COMMON.format(steps=args.steps)
    with deterministic():
        trainers = {
            (objective, seed): trainer_of(f"--objective {objective}", common, files, seed)
            for seed in range(args.seeds)
            for objective in ("fill", "next")
        }
        curves = train_together([*trainers.values()])
    for key, curve in zip(trainers, curves, strict=True):
        print(json.dumps({"run": key, "held_out_nats": curve[args.steps]}), flush=True)
    text, how = Text([args.val]), {"windows": args.windows, "batch": args.batch}
    command = results.command_line("holes_together", "TRAIN", "VAL", f"--steps {args.steps}")
    for hole in args.hole:
        for seed in range(args.seeds):
            fill, following = (trainers[objective, seed] for objective in ("fill", "next"))
            with deterministic(), use_backend(fill.config.backend):
                found = compare(fill.model, following.model, text, hole=hole, draws=1, **how)
            steps = {"run": fill.step, "next": following.step}
            row = {"run": f"fill, seed {seed}", "hole": hole, "steps": steps} | how | found
            print(json.dumps(row), flush=True)
            results.save("holes", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()

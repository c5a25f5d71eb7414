"""Losses by kind with one head and with the composite head, models that train at once on one GPU.

    python -m benchmarks.composite_heads DATA:WEIGHT,VAL ... [--seeds N] [--steps N] [--out DIR]

Each text is a part of the mixture that trains, and of what is held out. The models of all seeds are
`small` with `--ctx` bytes; the peer of the composite head is the linear head.
"""

import json
from dataclasses import replace

from arbcli.data.opening import open_texts
from arbcli.families.media.config import CompositeConfig
from arbcli.generation.evaluation import evaluate
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.together import train_together

HEADS = {"plain": None, "composite": CompositeConfig()}


def trainer(kind: str, seed: int, data: list[str], val: list[str], steps: int, ctx: int) -> Trainer:
    """Make the trainer of a kind of head."""
    config = new_config(
        preset="small", ctx=ctx, batch=16, steps=steps, seed=seed, data=data, val=val
    )
    config = replace(config, model=replace(config.model, composite=HEADS[kind]))
    return Trainer(config, open_texts(data, val, seed=seed, context=ctx), capture=True)


def main() -> None:
    """Train the models, and print and write a row for each."""
    parser = results.options("composite_heads", __doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", metavar="DATA:WEIGHT,VAL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ctx", type=int, default=1024)
    args = parser.parse_args()
    data, val = (list(part) for part in zip(*(text.split(",") for text in args.texts), strict=True))
    keys = [(kind, seed) for seed in range(args.seeds) for kind in HEADS]
    with deterministic():
        trainers = [trainer(*key, data, val, args.steps, args.ctx) for key in keys]
        train_together(trainers)
    command = results.command_line("composite_heads", f"--steps {args.steps} --ctx {args.ctx}")
    for (kind, seed), trained in zip(keys, trainers, strict=True):
        with deterministic():
            report = evaluate(
                trained.model, kind, trained.texts.val, "held out", stride=None, batch=16,
                backend=trained.config.backend,
            )  # fmt: skip
        losses = {one.kind: round(one.nats_per_byte, 4) for one in report.by_kind or ()}
        row = {"kind": kind, "seed": seed, "steps": args.steps, "ctx": args.ctx} | losses
        row["all"] = round(report.nats_per_byte, 4)
        print(json.dumps(row), flush=True)
        results.save("composite", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()

"""Train a chunked model with each router, and the dense model of its size, for the same time.

    python -m benchmarks.hnet_quality --text NAME --data TRAIN --val VAL [--cell CELL]... [--kind K]

A run is timed for some steps first, and then has as many as fit into its seconds; compiling and
timing are not counted. A GPU is one process's: two would share its time.
"""

import time
from typing import NamedTuple

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.hnet import KINDS, PEERS
from benchmarks.training_step import empty, run_steps


class Cell(NamedTuple):
    """A size of models, and how they read."""

    preset: str
    ctx: int
    batch: int
    seconds: float


CELLS = {
    "hnet-small-1024": Cell("hnet-small", 1024, 32, 15),
    "hnet-small-4096": Cell("hnet-small", 4096, 8, 15),
    "hnet-base-1024": Cell("hnet-base", 1024, 32, 36),
    "hnet-base-4096": Cell("hnet-base", 4096, 8, 36),
}
TIMED = 8
"""Steps."""
PEER = "dense"


def measure(cell: Cell, kind: str, seconds: float, seed: int, text: dict) -> dict:
    """Train once: what a row holds but for the name of the text."""
    empty()
    name, options = (PEERS[cell.preset][0], {}) if kind == PEER else (cell.preset, KINDS[kind])
    given = {"preset": name, "ctx": cell.ctx, "batch": cell.batch, "seed": seed, **options, **text}

    def prepare(steps: int) -> Trainer:
        config = new_config(steps=steps, device="cuda", **given)
        texts = open_texts(config.data, config.val, seed=0, context=cell.ctx)
        return Trainer(config, texts, capture=True)

    trainer = prepare(10_000)
    run_steps(trainer, EAGER_STEPS + 2)
    steps = max(1, int(seconds / run_steps(trainer, TIMED)))
    del trainer
    empty()
    trainer = prepare(steps)
    run_steps(trainer, steps)
    return {
        "preset": cell.preset,
        "kind": kind,
        "ctx": cell.ctx,
        "batch": cell.batch,
        "seconds": seconds,
        "seed": seed,
        "steps": steps,
        "held_out_nats": round(trainer.evaluate(), 4),
        "chunk_length": round(trainer.model.gauges().get("chunk_length", 1.0), 2),
    }


def main() -> None:
    """Print a line a run, and write its row as soon as it is there."""
    parser = results.options("hnet_quality", "Train chunked and dense models for the same time.")
    parser.add_argument("--text", required=True, help="what to call it")
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--cell", action="append", choices=CELLS, help="[default: all]")
    kinds = (PEER, *KINDS)
    parser.add_argument("--kind", action="append", choices=kinds, help="[default: all]")
    parser.add_argument("--seconds", type=float, help="of a run [default: by its size]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    text = {"data": [args.data], "val": [args.val]}
    for cell in map(CELLS.__getitem__, args.cell or CELLS):
        for kind in args.kind or kinds:
            started = time.perf_counter()
            with deterministic():
                row = measure(cell, kind, args.seconds or cell.seconds, args.seed, text)
            row = {"text": args.text, **row}
            took = time.perf_counter() - started
            print(*(f"{k} {v}," for k, v in row.items()), f"took {took:.0f} s", flush=True)
            command = f"python -m benchmarks.hnet_quality --text {args.text}"
            results.save("hnet_quality", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()

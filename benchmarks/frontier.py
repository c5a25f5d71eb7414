"""Measure the step and the peak of every kind of training, for the frontier of loss and memory.

    python -m benchmarks.frontier --data TRAIN --val VAL [--kind K]... [--shape S]... [--way W]...

A step's time says how many steps fit into a fixed time, and `benchmarks.scaling` what loss that
many steps give. A table then takes, for every budget of memory, the best loss of a kind among the
models that fit: that is what a user can choose. Only ways to compute a step are measured that leave
its loss as it is: a baseline adds up gradients of parts of a batch, our rules step otherwise then.
"""

from contextlib import nullcontext
from typing import Any

import torch

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.measuring import empty, run_steps
from benchmarks.scaling import CTX, KINDS, SHAPES, WINDOWS, options_of

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "recomputed": {"recompute": True},
    "a quarter": {"batch": WINDOWS // 4, "accum": 4},
    "a quarter, recomputed": {"batch": WINDOWS // 4, "accum": 4, "recompute": True},
}
"""How a step is computed: its memory, and a little of its speed."""
SAME_LOSS = {"ours": ("whole", "recomputed"), "twin": tuple(WAYS)}
ROUNDS, ROUND_SECONDS = 7, 0.1
"""The fastest round counts, as what others compile may disturb one."""


def measure(kind: str, shape: str, way: str, text: dict) -> dict:
    """Time steps: what a row holds."""
    torch._dynamo.reset()
    empty()
    config = new_config(**options_of(kind, shape, text, steps=10_000, **WAYS[way]))
    trainer = Trainer(
        config, open_texts(config.data, config.val, seed=0, context=CTX), capture=True
    )
    run_steps(trainer, 1)
    empty()  # what a compiler tried is not a part of a step
    run_steps(trainer, EAGER_STEPS + 2)
    steps = max(3, round(ROUND_SECONDS / run_steps(trainer, 3)))
    seconds = min(run_steps(trainer, steps) for _ in range(ROUNDS))
    row = {
        "kind": kind,
        "shape": shape,
        "way": way,
        "weights": trainer.num_weights,
        "ms": round(1e3 * seconds, 4),
        "peak_mib": round(torch.cuda.max_memory_reserved() / 2**20),
        "state_mib": round(trainer.state_bytes() / 2**20, 1),
    }
    trainer.release_graph()
    return row


def main() -> None:
    """Print a line a kind of step, and write its row as soon as it is there."""
    parser = results.options("frontier", "Measure steps and peaks of sizes and kinds.")
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    for name, known in (("kind", KINDS), ("shape", SHAPES), ("way", WAYS)):
        parser.add_argument(f"--{name}", action="append", choices=known, help="[default: all]")
    args = parser.parse_args()
    data = {"data": [args.data], "val": [args.val]}
    for shape in args.shape or SHAPES:
        for kind in args.kind or KINDS:
            ours = "weights" not in KINDS[kind]
            for way in args.way or SAME_LOSS["ours" if ours else "twin"]:
                with deterministic() if ours else nullcontext():
                    row = measure(kind, shape, way, data)
                print(*(f"{k} {v}," for k, v in row.items()), flush=True)
                command = results.command_line("frontier")
                results.save("frontier", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()

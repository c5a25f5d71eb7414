"""Find the held-out loss that every kind of training reaches in the same time, and its memory.

    python -m benchmarks.frontier --data TRAIN --val VAL [--seconds N] [--kind KIND]... [--shape S]

A run is timed for some steps first, and then has as many as fit into the seconds; compiling and
timing are not counted. Its peak is the most that the allocator held. A table then takes, for every
budget of memory, the best loss of a kind among the runs that fit: that is what a user can choose.
A GPU is one process's: two would share its time.
"""

import time
from contextlib import nullcontext

import torch

from arbcli.data import open_texts
from arbcli.device import deterministic
from arbcli.train.configure import new_config
from arbcli.train.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.training_step import empty, run_steps

CTX, WINDOWS = 256, 32
"""Bytes of a window, and windows of a step."""
SHAPES = {
    "256x4": {"dim": 256, "layers": 4, "heads": 4, "ffn": 704},
    "384x6": {"dim": 384, "layers": 6, "heads": 6, "ffn": 1024},
    "512x8": {"dim": 512, "layers": 8, "heads": 8, "ffn": 1408},
    "768x12": {"dim": 768, "layers": 12, "heads": 12, "ffn": 2048},
    "1024x16": {"dim": 1024, "layers": 16, "heads": 16, "ffn": 2816},
    "1536x20": {"dim": 1536, "layers": 20, "heads": 24, "ffn": 4096},
    "2048x24": {"dim": 2048, "layers": 24, "heads": 16, "ffn": 5632},
}
"""Width and blocks."""
KINDS = {
    "moment": {},
    "moment, all digits": {"digits": "all"},
    "nibble": {"rule": "nibble"},
    "nibble, all digits": {"rule": "nibble", "digits": "all"},
    "AdamW": {"weights": "float", "lr": 1.5e-3},
    "Muon": {"weights": "float", "optimizer": "muon"},
    "straight-through, Muon": {"weights": "ste", "optimizer": "muon"},
}
WAYS = {
    "whole": {"batch": WINDOWS},
    "a quarter": {"batch": WINDOWS // 4, "accum": 4},
    "recomputed": {"batch": WINDOWS // 4, "accum": 4, "recompute": True},
}
"""How a step is computed: its memory, and a little of its speed."""
TIMED = 8
"""Steps."""


def measure(kind: str, shape: str, way: str, text: dict, seconds: float, seed: int) -> dict:
    """Train once: what a row holds."""
    torch._dynamo.reset()
    empty()
    given = {"preset": "small", "ctx": CTX, "seed": seed, **SHAPES[shape], **KINDS[kind]}
    given |= WAYS[way] | text | {"device": "cuda"}

    def prepare(steps: int) -> Trainer:
        config = new_config(steps=steps, **given)
        texts = open_texts(config.data, config.val, seed=0, context=CTX)
        return Trainer(config, texts, capture=True)

    trainer = prepare(10_000)
    run_steps(trainer, EAGER_STEPS + 2)
    steps = max(1, int(seconds / run_steps(trainer, TIMED)))
    peak = torch.cuda.max_memory_reserved()
    del trainer
    empty()
    trainer = prepare(steps)
    run_steps(trainer, steps)
    return {
        "kind": kind,
        "shape": shape,
        "way": way,
        "seconds": seconds,
        "seed": seed,
        "weights": trainer.num_weights,
        "steps": steps,
        "peak_mib": round(peak / 2**20),
        "held_out_nats": round(trainer.evaluate(), 4),
    }


def main() -> None:
    """Print a line a run, and write its row as soon as it is there."""
    parser = results.options("frontier", "Find loss against memory in the same time.")
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    for name, known in (("kind", KINDS), ("shape", SHAPES), ("way", WAYS)):
        parser.add_argument(f"--{name}", action="append", choices=known, help="[default: all]")
    given = parser.parse_args()
    text = {"data": [given.data], "val": [given.val]}
    for shape in given.shape or SHAPES:
        for way in given.way or WAYS:
            for kind in given.kind or KINDS:
                started = time.perf_counter()
                with nullcontext() if "weights" in KINDS[kind] else deterministic():
                    row = measure(kind, shape, way, text, given.seconds, given.seed)
                took = time.perf_counter() - started
                print(*(f"{k} {v}," for k, v in row.items()), f"took {took:.0f} s", flush=True)
                command = results.command_line("frontier")
                results.save("frontier", [row], command=command, folder=given.out)


if __name__ == "__main__":
    main()

"""Train models of several sizes for several lengths, float and ternary: see `benchmarks.fits`.

    python -m benchmarks.scaling [RUN...] --data TRAIN --val VAL

RUN is a size, a number of steps and a kind, such as "384x6 1000 AdamW"; without any, all of four
sizes and four lengths are run, the longest first. A loss depends on the steps and not on their
time, so several processes may share a GPU. A baseline is captured and not compiled, as to compile
takes longer than most runs: that moves its last bits.
"""

import itertools
import time
import traceback
from contextlib import nullcontext
from typing import Any
from unittest import mock

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.training import compiled_baseline, float_optimizer
from arbcli.training.configure import new_config
from arbcli.training.float_optimizer import FloatOptimizer
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.measuring import empty

CTX, WINDOWS = 256, 32
"""Bytes of a window, and windows of a step."""
SHAPES = {
    "128x4": {"dim": 128, "layers": 4, "heads": 2, "ffn": 352},
    "256x4": {"dim": 256, "layers": 4, "heads": 4, "ffn": 704},
    "384x6": {"dim": 384, "layers": 6, "heads": 6, "ffn": 1024},
    "512x8": {"dim": 512, "layers": 8, "heads": 8, "ffn": 1408},
}
"""Width and blocks."""
KINDS: dict[str, dict[str, Any]] = {
    "moment": {},
    "moment, all digits": {"digits": "all"},
    "nibble": {"rule": "nibble"},
    "nibble, all digits": {"rule": "nibble", "digits": "all"},
    "AdamW": {"weights": "float", "lr": 1.5e-3},
    "Muon": {"weights": "float", "optimizer": "muon"},
    "straight-through, Muon": {"weights": "ste", "optimizer": "muon"},
}
LENGTHS = (250, 500, 1000, 2000)
"""Steps."""


def options_of(kind: str, shape: str, text: dict[str, list[str]], **given: Any) -> dict:
    """List the settings of a run."""
    return {"preset": "small", "ctx": CTX, "device": "cuda", **SHAPES[shape], **KINDS[kind]} | (
        text | {"batch": WINDOWS} | given
    )


def every_run() -> list[str]:
    """Name all sizes, lengths and kinds, those first that take longest."""
    runs = itertools.product(SHAPES.items(), LENGTHS, KINDS)
    named = {
        f"{shape} {steps} {kind}": steps * sizes["layers"] * (1 + (sizes["dim"] / 256) ** 2)
        for (shape, sizes), steps, kind in runs
    }
    return sorted(named, key=named.__getitem__, reverse=True)


def measure(kind: str, shape: str, steps: int, text: dict, seed: int) -> dict:
    """Train once, and return a row of results."""
    config = new_config(**options_of(kind, shape, text, steps=steps, seed=seed))
    texts = open_texts(config.data, config.val, seed=seed, context=CTX)
    plain = mock.patch.object(compiled_baseline, "compile_baseline")
    eager = mock.patch.object(
        float_optimizer, "FloatOptimizer", lambda *settings, compiled: FloatOptimizer(*settings)
    )
    with plain, eager, nullcontext() if "weights" in KINDS[kind] else deterministic():
        trainer = Trainer(config, texts, capture=True)
        for _ in range(steps):
            trainer.train_step()
        loss = trainer.evaluate()
    sizes = {"weights": trainer.num_weights, "bytes": steps * CTX * WINDOWS}
    trainer.release_graph()
    return {
        "kind": kind,
        "shape": shape,
        "steps": steps,
        "seed": seed,
        **sizes,
        "held_out_nats": round(loss, 4),
    }


def main() -> None:
    """Print a line a run, and write its row as soon as it is there."""
    parser = results.options("scaling", "Train several sizes for several lengths.")
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="begin no run after so many")
    args = parser.parse_args()
    text, started = {"data": [args.data], "val": [args.val]}, time.perf_counter()
    for run in args.runs or every_run():
        shape, steps, kind = run.split(maxsplit=2)
        if args.seconds and time.perf_counter() - started > args.seconds:
            break
        began = time.perf_counter()
        try:
            row = measure(kind, shape, int(steps), text, args.seed)
        except Exception:  # of one run: the others may do better
            traceback.print_exc()
            continue
        took = time.perf_counter() - began
        print(*(f"{k} {v}," for k, v in row.items()), f"took {took:.0f} s", flush=True)
        empty()
        command = results.command_line("scaling")
        results.save("scaling", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()

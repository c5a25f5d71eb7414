"""Time `arb-3b` in the memory of the system it re-creates, against a float baseline as large.

    python -m benchmarks.arb_3b [arb] [checkpoint] [baseline] [batches] [signs] [--out DIR]

The baseline is a dense model in float32 with AdamW that fills 5,106 MiB at batch 1; both are
captured, and the baseline is compiled. `batches` goes up to 1,024 windows, of `tiny` too. `signs`
has the rule `votes`, by gradients whose signs alone are stored, and by gradients that are stored.
The first step, which compiles what no run before it did, is timed apart.
"""

import itertools
import resource
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.checkpoint import load_checkpoint, save_checkpoint
from arbcli.model.updater import Updater
from arbcli.training.configure import new_config
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.training_step import empty, run_steps, text

LIMIT = 5106 * 2**20
"""The peak of the system that `arb-3b` re-creates."""
CTX = 64
TWIN = {"preset": "base", "dim": 1280, "heads": 10, "ffn": 3456, "layers": 16, "weights": "float"}
"""317.8 million weights: as many as fit at batch 1."""
TWIN_BATCHES = (1, 4, 8)
OURS = {"preset": "arb-3b"}
BATCHES = ((1, False), (6, False), (8, True), (24, True), (28, True), (32, True))
"""Windows of a batch, and whether blocks are computed again in the backward."""
LARGE = (
    *(("tiny", batch, False) for batch in (1, 16, 256, 1024)),
    ("arb-3b", 256, False), ("arb-3b", 1024, True),
)  # fmt: skip
"""Presets with windows of a batch, and whether blocks are computed again."""
SIGNED = ((1, False), (32, True))
ROUNDS, STEPS = 3, 4
FEW_STEPS_FROM = 256
"""Windows of a batch whose steps take so long that one is a round."""
PARTS = ("arb", "checkpoint", "baseline", "batches", "signs")


def build(batch: int, options: dict) -> Trainer:
    """Make a trainer on Python's own source."""
    config = new_config(ctx=CTX, batch=batch, steps=1000, device="cuda", **options)
    return Trainer(config, open_texts([str(text())], None, seed=0, context=CTX), capture=True)


def measure(kind: str, batch: int, options: dict) -> dict:
    """Print a line about a step, and return it as a row: time, and what the allocator held."""
    empty()
    torch._dynamo.reset()
    with nullcontext() if "weights" in options else deterministic():
        trainer = build(batch, options)
        first = run_steps(trainer, 1)
        run_steps(trainer, EAGER_STEPS)
        steps = STEPS if batch < FEW_STEPS_FROM else 1
        seconds = statistics.median(run_steps(trainer, steps) for _ in range(ROUNDS))
    peak = torch.cuda.max_memory_allocated()
    row = {
        "kind": kind,
        "batch": batch,
        "recompute": options.get("recompute", False),
        "weights": trainer.num_weights,
        "state_bytes": trainer.state_bytes(),
        "ms": round(1e3 * seconds, 2),
        "first_ms": round(1e3 * first, 2),
        "bytes_per_second": round(batch * CTX / seconds),
        "allocated_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    print(
        f"{kind}: {row['weights']:,} weights {options} batch {batch}: {row['ms']:.1f} ms a step,"
        f" the first {first:.1f} s, {row['bytes_per_second']:,} bytes/s,"
        f" peak {peak / 2**20:,.0f} MiB{', too much' * (peak > LIMIT)}",
        flush=True,
    )
    return row


def time_construction() -> None:
    """Print how long it takes from nothing to a model on the GPU, and the process's memory."""
    started = time.perf_counter()
    trainer = build(1, OURS)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = trainer.state_bytes()
    print(f"constructed in {seconds:.1f} s, state {state / 2**20:,.1f} MiB, host {host >> 10} MiB")


def time_checkpoint() -> None:
    """Print how long a whole checkpoint takes to be written and to be read and verified."""
    with tempfile.TemporaryDirectory() as name:
        trainer = build(1, OURS)
        trainer.train_step()
        torch.cuda.synchronize()
        times = [time.perf_counter()]
        path = save_checkpoint(Path(name), trainer.checkpoint("no text"))
        times.append(time.perf_counter())
        load_checkpoint(path)
        times.append(time.perf_counter())
        size = path.stat().st_size
    wrote, read = (b - a for a, b in itertools.pairwise(times))
    print(f"checkpoint of {size:,} bytes: written in {wrote:.1f} s, verified in {read:.1f} s")


def main() -> None:
    """Print a line a measurement, and write those of steps as rows."""
    parser = results.options("arb_3b", "Time arb-3b against a float baseline in the same memory.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    args = parser.parse_args()
    parts = args.parts or PARTS
    command = results.command_line("arb_3b", *args.parts)

    def save(*about: Any) -> None:
        results.save("arb_3b", [measure(*about)], command=command, folder=args.out)

    if "arb" in parts:
        time_construction()
        for batch, recompute in BATCHES:
            save("arb-3b", batch, OURS | {"recompute": recompute})
    if "checkpoint" in parts:
        time_checkpoint()
    if "baseline" in parts:
        for batch in TWIN_BATCHES:
            save("AdamW", batch, TWIN)
    if "batches" in parts:
        for preset, batch, recompute in LARGE:
            save(preset, batch, {"preset": preset, "recompute": recompute})
    if "signs" in parts:
        for batch, recompute in SIGNED:
            about = batch, OURS | {"rule": "votes", "recompute": recompute}
            save("votes, signs", *about)
            with mock.patch.object(Updater, "takes_signs", False):
                save("votes, stored gradients", *about)


if __name__ == "__main__":
    main()

"""Time `arb-3b` in the memory of the system it re-creates, beside a float twin that fills as much.

    python -m benchmarks.arb_3b [ours] [twin] [compiled] [checkpoint]

The twin is a dense `ByteLM` in float32 with AdamW, as large as 5,106 MiB take at batch 1, as it is
and compiled (`torch.compile`). Ours is captured.
"""

import gc
import itertools
import resource
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from arbcli.checkpoint import load_checkpoint, save_checkpoint
from arbcli.data import open_texts
from arbcli.device import deterministic
from arbcli.train.configure import new_config
from arbcli.train.trainer import Trainer
from benchmarks.training_step import run_steps

LIMIT = 5106 * 2**20
"""The peak of the system that `arb-3b` re-creates."""
CTX = 64
TWIN = {"preset": "base", "dim": 1280, "heads": 10, "ffn": 3456, "weights": "float"}
TWIN_LAYERS = 16
"""As many as fit."""
TWIN_BATCHES = (1, 4, 8)
OURS = {"preset": "arb-3b"}
BATCHES = ((1, False), (6, False), (8, True), (24, True), (28, True), (32, True))
"""Windows of a batch, and whether blocks are computed again in the backward."""
ROUNDS = 3


def build(batch: int, options: dict) -> Trainer:
    """Make a trainer on Python's own source."""
    config = new_config(ctx=CTX, batch=batch, steps=1000, device="cuda", **options)
    return Trainer(config, open_texts(None, None, seed=0, context=CTX), capture=True)


def measure(batch: int, options: dict, *, compiled: bool = False) -> None:
    """Print a line about a step: milliseconds, bytes a second, and the peak of the allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ours = "weights" not in options
    with deterministic() if ours else nullcontext():
        trainer = build(batch, options)
        if compiled:
            trainer.model.loss = torch.compile(trainer.model.loss)
        run_steps(trainer, 6)
        seconds = statistics.median(run_steps(trainer, 4) for _ in range(ROUNDS))
    peak = torch.cuda.max_memory_allocated()
    print(
        f"{trainer.num_weights:,} weights {options}{' compiled' * compiled} batch {batch}:"
        f" {1e3 * seconds:.1f} ms a step, {batch * CTX / seconds:,.0f} bytes/s,"
        f" peak {peak / 2**20:,.0f} MiB{', too much' * (peak > LIMIT)}",
        flush=True,
    )


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


def main(parts: list[str]) -> None:
    """Print a line a measurement."""
    if "ours" in parts:
        time_construction()
        for batch, recompute in BATCHES:
            options = OURS | ({"recompute": True} if recompute else {})
            measure(batch, options)
    if "checkpoint" in parts:
        time_checkpoint()
    for part in ("twin", "compiled"):
        if part in parts:
            for batch in TWIN_BATCHES:
                measure(batch, TWIN, compiled=part == "compiled")


if __name__ == "__main__":
    main(sys.argv[1:] or ["ours", "checkpoint", "twin", "compiled"])

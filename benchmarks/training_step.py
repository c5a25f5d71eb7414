"""Time a training step of every preset beside its compiled float twin: `make bench`.

    python -m benchmarks.training_step [PRESET...] [KIND...]

`factored` is compared with AdamW, and `orthogonal` with Muon, which pays for the same iteration.
A twin's model is compiled whole; its optimizer is torch's own, AdamW fused. Every step draws its
batch as training does. The order is ours, then the twins, one after another on the same GPU.
"""

import gc
import statistics
import sys
import time
from collections.abc import Collection
from contextlib import nullcontext

import torch

from arbcli.data import open_texts
from arbcli.device import deterministic
from arbcli.train.configure import new_config
from arbcli.train.trainer import Trainer

SHAPES = {"tiny": (64, 16), "small": (256, 32), "base": (1024, 16), "1b": (2048, 8)}
"""Context and windows of a batch, by preset."""
WARM_UP, ROUNDS = 6, 5
KINDS = {
    "moment, factored": {"rule": "moment", "direction": "factored"},
    "moment, factored, fp8": {"rule": "moment", "direction": "factored", "compute": "fp8"},
    "moment, orthogonal": {"rule": "moment"},
    "moment, orthogonal, fp8": {"rule": "moment", "compute": "fp8"},
    "float, AdamW": {"weights": "float"},
    "float, AdamW, no sub-norms": {"weights": "float", "sub_norms": False},
    "float, Muon": {"weights": "float", "optimizer": "muon"},
}
PEERS = {
    "moment, factored": "float, AdamW",
    "moment, factored, fp8": "float, AdamW",
    "moment, orthogonal": "float, Muon",
    "moment, orthogonal, fp8": "float, Muon",
}


def build(preset: str, options: dict) -> Trainer:
    """Make a trainer on Python's own source."""
    ctx, batch = SHAPES[preset]
    config = new_config(preset=preset, ctx=ctx, batch=batch, steps=10_000, device="cuda", **options)
    trainer = Trainer(config, open_texts(None, None, seed=0, context=ctx), capture=True)
    if trainer.optimizer:
        trainer.model.loss = torch.compile(trainer.model.loss)
    return trainer


def run_steps(trainer: Trainer, steps: int) -> float:
    """Do some steps; return the seconds of one."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def measure(preset: str, options: dict) -> tuple[float, float]:
    """Return milliseconds a step, the median of some rounds, and the peak in MiB.

    A captured step holds its memory as one pool, which the allocator counts as reserved.
    """
    ours = "weights" not in options
    steps = 3 if preset == "1b" else 10
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with deterministic() if ours else nullcontext():
        trainer = build(preset, options)
        run_steps(trainer, WARM_UP)
        seconds = statistics.median(run_steps(trainer, steps) for _ in range(ROUNDS))
    peak = torch.cuda.max_memory_reserved() if ours else torch.cuda.max_memory_allocated()
    return 1e3 * seconds, peak / 2**20


def main(presets: list[str], kinds: Collection[str] = KINDS) -> None:
    """Print a line a step, and the ratios of each preset."""
    for preset in presets:
        found = {}
        for name in kinds:
            options = KINDS[name]
            found[name] = milliseconds, peak = measure(preset, options)
            gc.collect()
            speed = 1e3 * SHAPES[preset][0] * SHAPES[preset][1] / milliseconds
            print(
                f"{preset:5} {name:26} {milliseconds:8.2f} ms {speed:12,.0f} bytes/s"
                f" {peak:8,.0f} MiB",
                flush=True,
            )
        for name, peer in PEERS.items():
            if name not in found or peer not in found:
                continue
            (ours, our_peak), (theirs, their_peak) = found[name], found[peer]
            print(
                f"{preset:5} {name} against {peer}: {theirs / ours:.2f} x its speed,"
                f" {our_peak / their_peak:.2f} x its peak",
                flush=True,
            )


if __name__ == "__main__":
    given = sys.argv[1:]
    named = [name for name in given if name in KINDS]
    main([name for name in given if name in SHAPES] or list(SHAPES), named or KINDS)

"""Train `arb-tiny` with and without each of its parts, at equal weights, and a `ByteLM` of as many.

    python -m benchmarks.ablation TRAIN VAL [--seed N] [--steps N] [NAME...]

The width of the MLPs takes up what a part leaves. NAME is one of `VARIANTS`; all by default.
"""

import argparse
import time

import torch

from arbcli.data import open_texts
from arbcli.device import deterministic
from arbcli.memory import predict
from arbcli.model.config import preset
from arbcli.runs import new_config
from arbcli.training import Trainer

PEER = {"preset": "tiny", "dim": 288, "heads": 6, "layers": 6, "ffn": 736, "ctx": 256}
"""A `ByteLM` of 5.96 million weights."""
VARIANTS: dict[str, dict | None] = {
    "ByteLM": None,
    "arb-tiny": {},
    "no-sequencer": {"sequencer": False},
    "no-codebook": {"codebook": False},
    "no-knowledge": {"knowledge_codebook": False},
    "no-router": {"router": False},
    "no-attention": {"attention": False},
    "moe": {"moe": True},
    "graph": {"graph": True},
    "moe-graph": {"moe": True, "graph": True},
    "memgram": {"memgram": True},
}
"""By name, what is changed in the preset."""


def options(name: str) -> dict:
    """Find the options of a variant, with the widest MLPs that leave it no more weights."""
    if VARIANTS[name] is None:
        return PEER
    given = dict(PEER)
    limit = predict(preset(given.pop("preset"), **given)).total.weights
    widest = None
    for ffn in range(32, 4096, 16):
        shape = {"ffn": ffn, "head_ffn": ffn // 2, **VARIANTS[name]}
        if predict(preset("arb-tiny", **shape)).total.weights <= limit:
            widest = {"preset": "arb-tiny", "ctx": PEER["ctx"], **shape}
    return widest


def train(name: str, train_path: str, val_path: str, seed: int, steps: int) -> str:
    """Train a variant; return a line about it."""
    config = new_config(
        **options(name), data=[train_path], val=[val_path], batch=32, steps=steps, seed=seed
    )
    texts = open_texts(config.data, config.val, seed=seed, context=config.model.ctx)
    with deterministic():
        trainer = Trainer(config, texts, capture=True)
        started = 0.0
        while trainer.step < steps:
            loss = trainer.train_step()
            if trainer.step == 8:  # captured by now
                float(loss)
                started = time.perf_counter()
        float(loss)
        milliseconds = 1e3 * (time.perf_counter() - started) / max(steps - 8, 1)
        val_loss = trainer.evaluate()
    shape = f"{predict(config.model).total.weights:,} weights, ffn {config.model.ffn}"
    return f"{name:13} seed {seed}: {val_loss:.4f} nats, {milliseconds:.1f} ms a step, {shape}"


def main() -> None:
    """Print a line a variant."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation")
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    for name in given.names or VARIANTS:
        print(train(name, given.train, given.val, given.seed, given.steps), flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Train `arb-tiny` with and without each of its parts, at equal weights, and a dense model.

    python -m benchmarks.ablation TRAIN VAL [--seed N] [--steps N] [--equal-time] [NAME...]

The width of the MLPs takes up what a part leaves. NAME is one of `VARIANTS`; all by default. With
`--equal-time` each takes as many steps as fit the time that `--steps` of `arb-tiny` take.
"""

import time

import torch

from arbcli.config.presets import preset
from arbcli.data import open_texts
from arbcli.device import deterministic
from arbcli.inspect.memory import predict
from arbcli.train.configure import new_config
from arbcli.train.trainer import Trainer
from benchmarks import results

PEER = {"preset": "tiny", "dim": 288, "heads": 6, "layers": 6, "ffn": 736, "ctx": 256}
"""A dense model of 5.96 million weights."""
CAPTURED = 8
"""Steps after which one is captured for certain."""
TIMED = 108
VARIANTS: dict[str, dict | None] = {
    "LanguageModel": None,
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


def build(name: str, paths: tuple[str, str], seed: int, steps: int) -> Trainer:
    """Make the trainer of a variant."""
    train, val = paths
    config = new_config(**options(name), data=[train], val=[val], batch=32, steps=steps, seed=seed)
    texts = open_texts(config.data, config.val, seed=seed, context=config.model.ctx)
    return Trainer(config, texts, capture=True)


def run(trainer: Trainer, steps: int) -> float:
    """Train until a step; return the milliseconds of one, those of the first steps left out."""
    started = 0.0
    while trainer.step < steps:
        loss = trainer.train_step()
        if trainer.step == CAPTURED:
            float(loss)
            started = time.perf_counter()
    float(loss)
    return 1e3 * (time.perf_counter() - started) / max(steps - CAPTURED, 1)


def steps_in_equal_time(name: str, paths: tuple[str, str], steps: int) -> int:
    """Count the steps of a variant that take as long as so many of `arb-tiny`."""
    times = (run(build(kind, paths, 0, TIMED), TIMED) for kind in ("arb-tiny", name))
    return round(steps * next(times) / next(times))


def train(name: str, paths: tuple[str, str], seed: int, steps: int) -> dict:
    """Train a variant; print a line about it, and return it as a row."""
    trainer = build(name, paths, seed, steps)
    milliseconds, model = run(trainer, steps), trainer.config.model
    row = {
        "variant": name,
        "seed": seed,
        "steps": steps,
        "held_out_nats": round(trainer.evaluate(), 4),
        "ms": round(milliseconds, 2),
        "weights": predict(model).total.weights,
        "ffn": model.ffn,
    }
    print(
        f"{name:13} seed {seed}: {row['held_out_nats']:.4f} nats after {steps} steps,"
        f" {milliseconds:.1f} ms a step, {row['weights']:,} weights, ffn {model.ffn}",
        flush=True,
    )
    return row


def main() -> None:
    """Print a line a variant, and write the rows."""
    parser = results.options("ablation", "Train arb-tiny with and without each of its parts.")
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--equal-time", action="store_true")
    given = parser.parse_intermixed_args()
    paths, rows = (given.train, given.val), []
    for name in given.names or VARIANTS:
        with deterministic():
            steps = given.steps
            if given.equal_time:
                steps = steps_in_equal_time(name, paths, steps)
            rows.append(train(name, paths, given.seed, steps))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    words = ["TRAIN", "VAL", *["--equal-time"] * given.equal_time]
    results.save("ablation", rows, command=results.command_line("ablation", *words),
                 folder=given.out)  # fmt: skip


if __name__ == "__main__":
    main()

"""Train `arb-tiny` with and without each of its parts, at equal weights, and a dense model.

    python -m benchmarks.ablation TRAIN VAL [--seeds N...] [--steps N] [--equal-time] [NAME...]

The width of the MLPs takes up what a part leaves. NAME is one of `VARIANTS`; all by default. With
`--equal-time` each takes as many steps as fit the time that `--steps` of `arb-tiny` take. A model
with a graph is evaluated a second time after its edges were taken out.
"""

import time
from bisect import bisect_right
from functools import cache
from typing import Any

from arbcli.config.presets import preset
from arbcli.data.opening import open_texts
from arbcli.families.graph.edges import Edges
from arbcli.inspect.memory import predict
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.training_step import empty

PEER: dict[str, Any] = {
    "preset": "tiny",
    "dim": 288,
    "heads": 6,
    "layers": 6,
    "ffn": 736,
    "ctx": 256,
}
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
    "graph-gate": {"moe": True, "graph": True, "graph_gate": True},
    "graph-adapters": {"moe": True, "graph": True, "graph_adapters": True},
    "scale-losses": {"moe": True, "graph": True},
    "memgram": {"memgram": True},
}
"""Changed settings of the preset, by name."""
OF_RUNS: dict[str, dict[str, Any]] = {"scale-losses": {"scale_losses": ("moe_graph=text",)}}
"""Changed settings of the run, by name."""


@cache
def options(name: str) -> dict:
    """Return the options of a variant, with the widest MLPs that give it no more weights."""
    if VARIANTS[name] is None:
        return PEER
    given = dict(PEER)
    limit = predict(preset(given.pop("preset"), **given)).total.weights

    def shape(ffn: int) -> dict[str, Any]:
        return {"ffn": ffn, "head_ffn": ffn // 2, **(VARIANTS[name] or {})}

    def weights(ffn: int) -> int:
        return predict(preset("arb-tiny", **shape(ffn))).total.weights

    widths = range(32, 4096, 16)
    widest = widths[bisect_right(widths, limit, key=weights) - 1]
    return {"preset": "arb-tiny", "ctx": PEER["ctx"], **shape(widest)}


def build(name: str, paths: tuple[str, str], seed: int, steps: int) -> Trainer:
    """Make the trainer of a variant."""
    train, val = paths
    given = options(name) | OF_RUNS.get(name, {})
    config = new_config(**given, data=[train], val=[val], batch=32, steps=steps, seed=seed)
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
    return round(steps * milliseconds("arb-tiny", paths) / milliseconds(name, paths))


@cache
def milliseconds(name: str, paths: tuple[str, str]) -> float:
    """Time a step of a variant."""
    return run(build(name, paths, 0, TIMED), TIMED)


def train(name: str, paths: tuple[str, str], seed: int, steps: int) -> dict:
    """Train a variant; print a line about it, and return it as a row."""
    trainer = build(name, paths, seed, steps)
    ms, model = run(trainer, steps), trainer.config.model
    row = {
        "variant": name,
        "seed": seed,
        "steps": steps,
        "held_out_nats": round(trainer.evaluate(), 4),
        "ms": round(ms, 2),
        "weights": predict(model).total.weights,
        "ffn": options(name)["ffn"],
    }
    if edges := [part for part in trainer.model.modules() if isinstance(part, Edges)]:
        row["edges"] = sum(int((part.score > 0).sum()) for part in edges)
        for part in edges:
            part.score.zero_()
        row["held_out_nats_without_edges"] = round(trainer.evaluate(), 4)
    print(row, flush=True)
    return row


def main() -> None:
    """Print a line a variant, and write the rows."""
    parser = results.options("ablation", "Train arb-tiny with and without each of its parts.")
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--equal-time", action="store_true")
    given = parser.parse_intermixed_args()
    paths = given.train, given.val
    words = ["TRAIN", "VAL", "--steps", str(given.steps), *["--equal-time"] * given.equal_time]
    command = results.command_line("ablation", *words)
    for seed in given.seeds:
        for name in given.names or VARIANTS:
            empty()
            with deterministic():
                steps = given.steps
                if given.equal_time:
                    steps = steps_in_equal_time(name, paths, steps)
                row = train(name, paths, seed, steps)
            results.save("ablation", [row], command=command, folder=given.out)


if __name__ == "__main__":
    main()

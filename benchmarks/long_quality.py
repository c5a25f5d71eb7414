"""Train models of compressed attention and others for the same time.

    python -m benchmarks.long_quality TRAIN VAL [--seconds N] [--batch N] [--seeds N...]
        [--stride N] [--ms MS] [--out DIR] [KIND...]

The peer of `arb-long` is `--preset base --ctx 16384`: a dense model of 85.5 million weights with
attention to all bytes. Other kinds are options of the presets, besides `compressed` and `deep`.
Each takes as many steps as fit the seconds, by a step that is timed before, or that took so
many milliseconds on a GPU of its own, where others share it now (`--ms`). Then it predicts the
whole held-out text, from windows that overlap, so that the same bytes are seen after few bytes and
after many, and once more with keys and values in eight bits.
"""

from typing import Any

from arbcli.data.opening import open_text, open_texts
from arbcli.generation.evaluation import evaluate
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.ablation import CAPTURED, run
from benchmarks.training_step import empty

KINDS: dict[str, dict[str, Any]] = {
    "compressed": {"preset": "arb-long"},
    "dense": {"preset": "base", "ctx": 16384},
    "means of 128": {"preset": "arb-long", "mean_ratio": 128},
    "gain of keys": {"preset": "arb-long", "key_gain": True},
    "128 heads of 512": {"preset": "arb-long", "heads": 128, "head_width": 512, "recompute": True},
    "deep": {"preset": "arb-deep-small"},
    "384 experts": {"preset": "arb-deep-small", "experts": 384, "top_k_experts": 6},
    "NVFP4": {"preset": "arb-deep-small", "compute": "nvfp4"},
}
DEFAULT = ("compressed", "dense")
TIMED = 12
"""Steps that are timed after a capture."""
CACHE_DTYPES = (None, "int8", "fp8", "int8-mixed", "fp8-mixed", "fp8-queries")


def build(kind: str, paths: tuple[str, str], batch: int, seed: int, steps: int) -> Trainer:
    """Make the trainer of a kind."""
    train, val = paths
    config = new_config(**KINDS[kind], data=[train], val=[val], batch=batch, seed=seed, steps=steps)
    texts = open_texts(config.data, config.val, seed=seed, context=config.model.ctx)
    return Trainer(config, texts, capture=True)


def train(
    kind: str,
    paths: tuple[str, str],
    batch: int,
    seed: int,
    seconds: float,
    stride: int,
    milliseconds: float | None,
) -> dict:
    """Train a kind, and predict the held-out text; return a row."""
    if milliseconds is None:
        milliseconds = run(build(kind, paths, batch, seed, CAPTURED + TIMED), CAPTURED + TIMED)
        empty()
    steps = max(1, round(1e3 * seconds / milliseconds))
    trainer = build(kind, paths, batch, seed, steps)
    run(trainer, steps)
    model, config = trainer.model, trainer.config
    trainer.release_graph()
    about: dict[str, Any] = {"backend": config.backend, "batch": 1}
    text = open_text([paths[1]])
    found = evaluate(model, kind, *text, stride=stride, **about)
    row: dict[str, Any] = {
        "kind": kind,
        "seconds": seconds,
        "batch": batch,
        "seed": seed,
        "weights": trainer.num_weights,
        "steps": steps,
        "ms": round(milliseconds, 2),
        "trained_bytes": steps * batch * config.model.ctx,
        "bytes_per_second": round(1e3 * batch * config.model.ctx / milliseconds),
        "stride": stride,
        "nats": round(found.nats_per_byte, 5),
        "by_position": [
            [part.first, part.last, round(part.nats_per_byte, 5)] for part in found.by_position
        ],
    }
    print(
        f"{kind:24} seed {seed}: {row['nats']:.4f} nats after {steps} steps of"
        f" {milliseconds:.1f} ms, {row['trained_bytes'] / 1e6:.1f} MB",
        flush=True,
    )
    near, *others = (f"{nats:.4f} from {first}" for first, _, nats in row["by_position"])
    print("  by position:", ", ".join([near, *others]), flush=True)
    row["kept_in"] = {}
    for kv in CACHE_DTYPES:
        ctx = config.model.ctx
        whole = evaluate(model, kind, *text, stride=ctx, kv=kv, **about)
        with model.cached_as(kv):
            cache = model.new_cache(ctx).nbytes
        row["kept_in"][whole.kv] = {"nats": round(whole.nats_per_byte, 5), "cache_bytes": cache}
    print("  kept in:", row["kept_in"], flush=True)
    return row


def main() -> None:
    """Print what each run found, and write its row as soon as it is there."""
    parser = results.options("long_quality", "Compare models at equal time.")
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--stride", type=int, default=4096)
    parser.add_argument("--ms", type=float, help="of a step; timed if it is not given")
    given = parser.parse_intermixed_args()
    paths = given.train, given.val
    words = ["TRAIN", "VAL", "--seconds", f"{given.seconds:g}", "--stride", str(given.stride)]
    command = results.command_line("long_quality", *words)
    for seed in given.seeds:
        for kind in given.kinds or DEFAULT:
            empty()
            with deterministic():
                about = (given.batch, seed, given.seconds, given.stride, given.ms)
                row = train(kind, paths, *about)
            results.save("long_quality", [row], command=command, folder=given.out)


if __name__ == "__main__":
    main()

"""Search for the best combination of parts: equal training time, by successive halving.

    python -m benchmarks.search --text NAME --data TRAIN --val VAL [--ctx N] [--seconds S]...
                                [--kind KIND]... [--best N] [--seed N]... [--times FILE]
                                [--rival KIND... --final-val VAL] [--out DIR]

Every kind, of `KINDS` or those named, trains for the first number of seconds; the best, `--best` of
them or a quarter, train again, anew, for the next number. Each has as many steps as fit the time of
one that was timed before; compiling and timing are not counted. `--times FILE` holds these times:
what it lacks is timed and added, which needs a GPU without other processes, and trainings by times
that it has may share one. With 0 seconds kinds are only timed.

`--rival KIND --final-val VAL` compares the best one with another, of several the best of the first
round, in which rivals train, too. Both train for the last number of seconds on seeds 1 to 3, and
are judged on a text that chose nothing. The best one trains with trits as well, on seed 1.

A row that is in the file of `--out` already is read, and not measured again: a search that was
interrupted goes on where it was.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.presets import preset
from arbcli.data.opening import open_texts
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.families.mamba.config import MambaConfig
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.rules import DIGITS
from arbcli.training.configure import new_config
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.training_step import empty, run_steps

POSITIONS, TIMED = 32_768, 32
"""Bytes of a step, and steps that are timed."""
MLP, OUTER_MLP = MLPConfig(width=2048), MLPConfig(width=1408)
EXPERTS = ExpertsConfig(experts=4, top_k=2, width=512, gate="softplus", shared=True)
COMPRESSED = CompressedAttentionConfig(heads=12, kv_heads=1, head_width=128, ratio=4, window=128)
SMALL_EXPERTS = ExpertsConfig(experts=4, top_k=2, width=256, gate="softplus", shared=True)
SMALL_COMPRESSED = CompressedAttentionConfig(
    heads=6, kv_heads=1, head_width=64, ratio=4, window=128
)


def chunked(
    *,
    length: int = 4,
    boundaries: str = "every",
    mixer: PartConfig | None = None,
    channel: PartConfig = MLP,
    outer: PartConfig | None = None,
    outer_layers: int = 2,
    streams: int = 1,
    layers: int = 10,
) -> ModelConfig:
    """Assemble a stage of chunks around blocks of 768; everything else is `hnet-base`'s."""
    around = BlockConfig(mixer=outer or AttentionConfig(heads=8, window=128), channel=OUTER_MLP)
    inside = BlockConfig(mixer=mixer or AttentionConfig(heads=12), channel=channel)
    blocks = (around,) * outer_layers
    chunking = ChunkingConfig(boundaries=boundaries, length=length)
    stages = (
        StageConfig(dim=512, before=blocks, after=blocks, chunking=chunking),
        StageConfig(dim=768, streams=streams, blocks=(inside,) * layers),
    )
    return ModelConfig(ctx=4096, stages=stages)


def small(
    length: int,
    *,
    mixer: PartConfig | None = None,
    channel: PartConfig | None = None,
    streams: int = 1,
    **options: Any,
) -> ModelConfig:
    """Assemble a stage of chunks around blocks of 384."""
    given = {"boundaries": "every"} | options
    config = preset("hnet-small", **given, chunk_length=(length,))
    *outer, inner = config.stages
    blocks = tuple(
        BlockConfig(mixer=mixer or block.mixer, channel=channel or block.channel)
        for block in inner.blocks
    )
    inside = replace(inner, blocks=blocks, streams=streams)
    return replace(config, stages=(*outer, inside))


def small_dense(*, channel: PartConfig | None = None, streams: int = 1) -> ModelConfig:
    """Assemble the preset `small` with another channel mixer, or on more streams."""
    config = preset("small")
    (stage,) = config.stages
    blocks = tuple(replace(block, channel=channel or block.channel) for block in stage.blocks)
    return replace(config, stages=(replace(stage, blocks=blocks, streams=streams),))


def two_stages(length: tuple[int, int]) -> ModelConfig:
    """Assemble chunks of chunks around blocks of 768."""
    stages = [
        StageConfig(
            dim=dim,
            before=(block := BlockConfig(mixer=AttentionConfig(heads=heads, window=128),
                                         channel=MLPConfig(width=width)),),
            after=(block,),
            chunking=ChunkingConfig(boundaries="every", length=each),
        )
        for dim, heads, width, each in ((384, 6, 1024, length[0]), (512, 8, 1408, length[1]))
    ]  # fmt: skip
    inside = BlockConfig(mixer=AttentionConfig(heads=12), channel=MLP)
    return ModelConfig(ctx=4096, stages=(*stages, StageConfig(dim=768, blocks=(inside,) * 10)))


KINDS: dict[str, Any] = {
    "every 4": lambda: chunked(),
    "learned 4": lambda: chunked(boundaries="learned"),
    "every 3": lambda: chunked(length=3),
    "every 6": lambda: chunked(length=6),
    "every 8": lambda: chunked(length=8),
    "every 4, experts": lambda: chunked(channel=EXPERTS),
    "every 4, compressed": lambda: chunked(mixer=COMPRESSED),
    "every 4, Mamba outside": lambda: chunked(outer=MambaConfig(heads=8)),
    "every 4, one outer block": lambda: chunked(outer_layers=1),
    "every 4, three outer blocks": lambda: chunked(outer_layers=3),
    "every 4, two streams": lambda: chunked(streams=2),
    "every 2, then 2": lambda: two_stages((2, 2)),
    "every 6, experts": lambda: chunked(length=6, channel=EXPERTS),
    "every 8, Mamba outside": lambda: chunked(length=8, outer=MambaConfig(heads=8)),
    "every 12": lambda: chunked(length=12),
    "every 12, Mamba outside": lambda: chunked(length=12, outer=MambaConfig(heads=8)),
    "every 16": lambda: chunked(length=16),
    "every 24": lambda: chunked(length=24),
    "every 32": lambda: chunked(length=32),
    "every 64": lambda: chunked(length=64),
    "every 128": lambda: chunked(length=128),
    "every 16, experts": lambda: chunked(length=16, channel=EXPERTS),
    "every 16, two streams": lambda: chunked(length=16, streams=2),
    "every 16, three outer blocks": lambda: chunked(length=16, outer_layers=3),
    "every 16, one outer block": lambda: chunked(length=16, outer_layers=1),
    "every 16, Mamba outside": lambda: chunked(length=16, outer=MambaConfig(heads=8)),
    "every 16, compressed": lambda: chunked(length=16, mixer=COMPRESSED),
    "dense": lambda: preset("base"),
    "compressed": lambda: preset("arb-long"),
    "compressed, gains of keys": lambda: preset("arb-long", key_gain=True),
    "every 8, compressed": lambda: chunked(length=8, mixer=COMPRESSED),
    "learned 8": lambda: chunked(length=8, boundaries="learned"),
    "small, dense": lambda: preset("small"),
    "small, dense, experts": lambda: small_dense(channel=SMALL_EXPERTS),
    "small, dense, two streams": lambda: small_dense(streams=2),
    "small, every 2": lambda: small(2),
    "small, every 4": lambda: small(4),
    "small, every 8": lambda: small(8),
    "small, every 16": lambda: small(16),
    "small, every 32": lambda: small(32),
    "small, learned 4": lambda: small(4, boundaries="learned"),
    "small, every 4, Mamba outside": lambda: small(4, outer_blocks="mamba"),
    "small, every 8, Mamba outside": lambda: small(8, outer_blocks="mamba"),
    "small, every 8, compressed": lambda: small(8, mixer=SMALL_COMPRESSED),
    "small, every 8, experts": lambda: small(8, channel=SMALL_EXPERTS),
    "small, every 8, two streams": lambda: small(8, streams=2),
}
"""Models of about 85 million weights a byte, and small ones of 11 million."""


def measure(
    kind: str, ctx: int, digits: str, seconds: float, seed: int, text: dict, times: dict
) -> dict:
    """Train once, and return a row without the name of its text; without seconds, a time.

    The milliseconds of a step are those of `times`, by context, digits and kind, or added to it.
    """
    empty()
    model = replace(KINDS[kind](), ctx=ctx)
    given = {"batch": POSITIONS // ctx, "seed": seed, "digits": digits, **text}

    def prepare(steps: int) -> Trainer:
        config = new_config(preset=model, steps=steps, device="cuda", **given)
        texts = open_texts(config.data, config.val, seed=0, context=ctx)
        return Trainer(config, texts, capture=True)

    place = f"{ctx}, {digits}, {kind}"
    if place not in times:
        trainer = prepare(10_000)
        run_steps(trainer, EAGER_STEPS + 2)
        seconds_per_step = [run_steps(trainer, TIMED) for _ in range(3)]
        times[place] = round(1e3 * statistics.median(seconds_per_step), 3)
        del trainer
        empty()
    if not seconds:
        return {"kind": kind, "ms": times[place]}
    steps = max(1, int(1e3 * seconds / times[place]))
    trainer = prepare(steps)
    run_steps(trainer, steps)
    return {
        "kind": kind,
        "digits": digits,
        "weights": trainer.num_weights,
        "seconds": seconds,
        "seed": seed,
        "steps": steps,
        "held_out_nats": round(trainer.evaluate(64), 4),
    }


def run_round(
    args: argparse.Namespace,
    kinds: Iterable[str],
    seconds: float,
    seeds: Iterable[int],
    name: str,
    val: str,
    digits: str,
) -> dict[str, float]:
    """Train every kind on every seed, and write each row; return losses of the last seed."""
    times = json.loads(args.times.read_text()) if args.times and args.times.exists() else {}
    text = {"data": [args.data], "val": [val]}
    known = {
        tuple(row[field] for field in results.KEYS["search"]): row["held_out_nats"]
        for run in results.load("search", args.out)
        for row in run["rows"]
    }
    found = {}
    for seed, kind in product(seeds, kinds):
        key = (name, args.ctx, kind, digits, seconds, seed)
        if key in known:
            found[kind] = known[key]
            continue
        started = time.perf_counter()
        try:
            with deterministic():
                row = measure(kind, args.ctx, digits, seconds, seed, text, times)
        except ArbError as error:
            print(kind, "cannot be:", error, flush=True)
            continue
        if args.times:
            args.times.write_text(json.dumps(times, indent=1))
        row = {"text": name, "ctx": args.ctx, **row}
        took = time.perf_counter() - started
        print(*(f"{k} {v}," for k, v in row.items()), f"took {took:.0f} s", flush=True)
        if seconds:
            command = f"python -m benchmarks.search --text {args.text}"
            results.save("search", [row], command=command, folder=args.out)
            found[kind] = row["held_out_nats"]
    return found


def main() -> None:
    """Print a line a run, and write its row as soon as it is there."""
    parser = results.options("search", "Search for the best combination of parts.")
    parser.add_argument("--text", required=True, help="what to call it")
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--ctx", type=int, default=4096, help="bytes of context [default: 4096]")
    parser.add_argument("--kind", action="append", choices=KINDS, help="[default: all]")
    parser.add_argument("--best", type=int, help="how many go on [default: a quarter, 2 or more]")
    parser.add_argument("--digits", default="all", choices=DIGITS, help="[default: all]")
    parser.add_argument("--seconds", type=float, action="append", help="[default: 9, 36]")
    parser.add_argument("--seed", type=int, action="append", help="[default: 0]")
    parser.add_argument("--times", type=Path, help="milliseconds of a step by kind, as JSON")
    parser.add_argument(
        "--rival", action="append", choices=KINDS, help="kind that the best one is compared with"
    )
    parser.add_argument("--final-val", help="held-out text of that comparison")
    args = parser.parse_args()
    kinds = list(dict.fromkeys([*(args.kind or KINDS), *(args.rival or ())]))
    rounds = args.seconds or [9.0, 36.0]
    if args.rival and len(rounds) == 1:
        parser.error("--rival takes the last of --seconds, and there is but one")
    seeds = args.seed or (0,)
    losses: dict[str, float] = {}
    for seconds in rounds[:-1] if args.rival else rounds:
        found = run_round(args, kinds, seconds, seeds, args.text, args.val, args.digits)
        losses = found | losses  # the first round is of all
        kinds = sorted(found, key=found.__getitem__)[: args.best or max(2, len(found) // 4)]
    if args.rival:
        # a rival may be the best itself, and the second is compared with it then
        rival = min((kind for kind in args.rival if kind in losses), key=losses.__getitem__)
        best = min((kind for kind in found if kind != rival), key=found.__getitem__)
        name, val = f"{args.text}, other half", args.final_val or args.val
        run_round(args, (best, rival), rounds[-1], (1, 2, 3), name, val, args.digits)
        run_round(args, (best,), rounds[-1], (1,), name, val, "trit")


if __name__ == "__main__":
    main()

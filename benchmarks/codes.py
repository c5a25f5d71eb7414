"""A vector quantiser next to product keys, at the shapes of `arb-3b`: codes in use, time and loss.

    python -m benchmarks.codes TRAIN VAL [--shapes shared knowledge] [--steps N] [--out DIR]

Blocks of `arb-tiny` around one codebook of 131,072 x 1,024 (shared) or 5,000,000 x 64 (knowledge),
whose rows are found as the nearest code or by product keys, and next to no codebook. Losses are
told as training goes on, with the seconds that steps have taken by then, so that they can be
compared after equally many steps and after equal time. Then the held-out text is read: the share of
rows that it uses, their perplexity, and the share of rows that are dead. These are codes that no
position chose since they were made; or rows that no step has changed. A row of product keys is used
where any head reads it, and its perplexity is that of the best rows of all heads.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from arbcli.data.opening import open_texts
from arbcli.data.text import evaluation_batches
from arbcli.families.graph.codebook import Codebook
from arbcli.families.graph.quantiser import Quantiser
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results

SHARED = {"codebook": True, "knowledge_codebook": False}
KNOWLEDGE = {"codebook": False, "knowledge_codebook": True}
SHAPES: dict[str, dict[str, Any]] = {
    "shared": SHARED | {"codes": (512, 256), "code_dim": 1024, "code_heads": 4},
    "knowledge": KNOWLEDGE
    | {"knowledge": (2500, 2000), "knowledge_dim": 64, "knowledge_heads": 16},
}
COMMON = {"preset": "arb-tiny", "moe": False, "graph": False, "key_dim": 128, "top_k": 8}
KINDS: dict[str, dict[str, Any]] = {
    "nearest": {"code_search": "nearest"},
    "keys": {},
    "none": {"codebook": False, "knowledge_codebook": False},
}
TIMES_TOLD = 8
"""Losses of a run."""
READ_POSITIONS = 2**18
"""Number of positions of held-out text."""


@contextmanager
def noting(book: nn.Module, used: Tensor, best: Tensor) -> Iterator[None]:
    """Count how often each row is read, and how often it is the best of a head, in two (V,)."""

    def note(_table: nn.Module, given: tuple) -> None:
        count(used, given[0].flatten())
        count(best, given[0][:, 0])

    def note_codes(_book: nn.Module, _given: tuple, found: Any) -> None:
        count(used, found.codes.flatten())
        count(best, found.codes.flatten())

    def count(totals: Tensor, rows: Tensor) -> None:
        totals.index_add_(0, rows, torch.ones_like(rows))

    if isinstance(book, Codebook):
        handle = book.table.register_forward_pre_hook(note)
    else:
        handle = book.register_forward_hook(note_codes)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def in_use(trainer: Trainer) -> dict[str, float]:
    """Read held-out windows, and tell which rows they use."""
    model, config = trainer.model, trainer.config
    books = [part for part in model.children() if isinstance(part, Codebook | Quantiser)]
    if not books:
        return {}
    book = books[0]
    if isinstance(book, Quantiser):
        number, dead = len(book.codes), float((book.uses <= 1).float().mean())
    else:
        number = book.table.weight.out_features
        dead = 1 - book.table.weight.alive()
    used, best = torch.zeros(2, number, dtype=torch.int64, device=model.device)
    batches = max(1, READ_POSITIONS // (config.batch * config.model.ctx))
    drawn = evaluation_batches(
        trainer.texts.val,
        num_batches=batches,
        batch_size=config.batch,
        context=config.model.ctx,
        device=model.device,
    )
    with noting(book, used, best), use_backend(config.backend):
        for ids, _ in drawn:
            model(ids)
    shares = best.double() / best.sum()
    return {
        "positions": batches * config.batch * config.model.ctx,
        "used_share": float((used > 0).double().mean()),
        "perplexity": float(torch.special.entr(shares).sum().exp()),
        "dead_share": dead,
    }


def train(shape: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one model, and tell what became of its codes."""
    options = COMMON | SHAPES[shape] | KINDS[kind] | json.loads(args.options)
    config = new_config(
        **options, batch=args.batch, steps=args.steps, data=[args.train], val=[args.val],
        seed=args.seed,
    )  # fmt: skip
    texts = open_texts(config.data, config.val, seed=args.seed, context=config.model.ctx)
    trainer = Trainer(config, texts, capture=torch.cuda.is_available())
    cuda, seconds, told = trainer.device.type == "cuda", 0.0, []
    every = max(1, args.steps // TIMES_TOLD)
    while trainer.step < args.steps:
        started = time.perf_counter()
        for _ in range(min(every, args.steps - trainer.step)):
            trainer.train_step()
        if cuda:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - started
        told.append((trainer.step, round(seconds, 2), round(trainer.evaluate(), 4)))
        print(f"{shape} {kind} step, seconds, nats a byte:", *told[-1], flush=True)
    row = {"shape": shape, "kind": kind, "seed": args.seed, "steps": args.steps}
    row |= {"seconds": seconds, "val_loss": told[-1][2], "told": told, **in_use(trainer)}
    row["state_bytes"] = trainer.state_bytes()
    return row


def main() -> None:
    """Train all kinds at each shape, and write rows as they come."""
    parser = results.options("codes", __doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["shared"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="{}", help="JSON of further options of a run")
    args = parser.parse_args()
    words = ("--shapes", *args.shapes, "--steps", str(args.steps))
    command = results.command_line("codes", "TRAIN", "VAL", *words)
    with deterministic():
        for shape in args.shapes:
            for kind in args.kinds:
                row = train(shape, kind, args)
                print(json.dumps(row), flush=True)
                results.save("codes", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()

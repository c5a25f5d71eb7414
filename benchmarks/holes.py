"""Nats a byte of holes in a text, by a model that sees both sides, and by its peers.

The first run is of a masked model, or has `objective=fill`: that reads both sides before it fills a
hole from left to right. The peers are a model of the next byte, which ignores the right side, and
the first model where all of that is hidden from it, too. Every window has one hole, in its middle.
The masked model fills it in a random order, for which the bound of `arbcli.masking` is estimated by
some draws; or from left to right, for which its loss is exact. Each length of a hole prints an
object of JSON.

    python -m benchmarks.holes MASKED|FILL NEXT TEXT [--hole BYTES...]
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from arbcli.config.model import VOCABULARY
from arbcli.data import Text
from arbcli.device import deterministic, resolve_backend
from arbcli.filling import EXTRA, led_in
from arbcli.infer.load import load_model
from arbcli.kernels.runtime.backend import use_backend
from arbcli.masking import hide
from arbcli.model.language_model import LanguageModel


def next_loss(model: LanguageModel, ids: Tensor, hole: slice) -> float:
    """Average the cross-entropy of the bytes of holes, (B, T) ids, by those before each."""
    losses = model.position_losses(ids[:, :-1], ids[:, 1:])
    return float(losses[:, hole.start - 1 : hole.stop - 1].mean())


def masked_loss(
    model: LanguageModel, ids: Tensor, hole: slice, draws: int, step: int, *, right: bool
) -> float:
    """Average the bound over the bytes of holes, with what is after them or without."""
    total, symbol = 0.0, model.config.vocabulary
    for draw in range(draws):
        numbers = range(draw * len(ids), (draw + 1) * len(ids))
        given, targets = ids.clone(), torch.full_like(ids, -1)
        given[:, hole], targets[:, hole] = hide(
            ids[:, hole], symbol, seed=0, step=step, numbers=numbers, of=draws * len(ids)
        )
        if not right:
            given[:, hole.stop :] = symbol
        total += float(model.position_losses(given, targets).mean()) / draws
    return total


def ordered_loss(model: LanguageModel, ids: Tensor, hole: slice) -> float:
    """Average the loss of the bytes of holes, filled from left to right with both sides known."""
    total = torch.zeros((), device=ids.device)
    for place in range(hole.start, hole.stop):
        given, targets = ids.clone(), torch.full_like(ids, -1)
        given[:, place : hole.stop] = model.config.vocabulary
        targets[:, place] = ids[:, place]
        total += model.position_losses(given, targets).mean()
    return float(total) / (hole.stop - hole.start)


def filled_loss(model: LanguageModel, ids: Tensor, hole: slice, *, right: bool) -> float:
    """Average the loss of the bytes of holes after both sides, or after an empty right side."""
    rows, size = [], hole.stop - hole.start
    for row in ids:
        after = row[hole.stop :] if right else row[:0]
        rows.append(led_in(row[: hole.start], row[hole], after, model.config.vocabulary))
    whole = torch.stack(rows)
    losses = model.position_losses(whole[:, :-1], whole[:, 1:].clamp(max=VOCABULARY - 1))
    return float(losses[:, -size:].mean())


@torch.no_grad()
def compare(
    masked: LanguageModel, following: LanguageModel, text: Text, *,
    hole: int, windows: int, batch: int, draws: int,
) -> dict[str, float]:  # fmt: skip
    """Average the nats a byte of `windows` holes, spread evenly over a text."""
    in_order = not masked.config.is_masked
    context = min(masked.config.ctx - EXTRA * in_order, following.config.ctx)
    place = slice((context - hole) // 2, (context + hole) // 2)
    apart = (len(text) - context) // windows
    first, *others = ("fill",) if in_order else ("masked", "masked from left to right")
    kinds = ("next", first, f"{first} without the right side", *others)
    sums = dict.fromkeys(kinds, 0.0)
    for begin in range(0, windows, batch):
        starts = [apart * number for number in range(begin, min(begin + batch, windows))]
        ids = text.window_batch(starts, context).to(masked.device).long()
        share = len(starts) / windows
        sums["next"] += share * next_loss(following, ids, place)
        for name, right in zip(kinds[1:3], (True, False), strict=True):
            if in_order:
                found = filled_loss(masked, ids, place, right=right)
            else:
                found = masked_loss(masked, ids, place, draws, begin, right=right)
            sums[name] += share * found
        if not in_order:
            sums[kinds[3]] += share * ordered_loss(masked, ids, place)
    return sums


def main() -> None:
    """Compare two runs, and print an object of JSON for each length of a hole."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("masked", "next", "text"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--hole", type=int, nargs="+", default=[16])
    sizes = {"windows": 512, "batch": 32, "draws": 16}
    for name, usual in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    masked, following = load_model(args.masked), load_model(args.next)
    how = {name: getattr(args, name) for name in sizes}
    text = Text([args.text])
    for hole in args.hole:
        with deterministic(), use_backend(resolve_backend(None, masked.device)):
            losses = compare(masked, following, text, hole=hole, **how)
        found = {"run": args.masked.name, "device": str(masked.device), "hole": hole}
        print(json.dumps(found | how | {"nats_per_byte": losses}), flush=True)


if __name__ == "__main__":
    main()

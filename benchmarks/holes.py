"""Nats a byte of holes in a text, by a model that sees both sides, and by its peers.

The first run is of a masked model, or has `objective=fill`: that reads both sides before it fills a
hole from left to right. The peers are a model of the next byte, which ignores the right side, and
the first model where all of that is hidden from it, too. Every window has one hole, in its middle.
The masked model fills it in a random order, for which the bound of
`arbcli.families.masked.masking` is estimated by some draws; or from left to right, for which
its loss is exact. Each length of a hole prints a row
of JSON, which is also written to `holes.json`: losses, by how much each exceeds that of the model
of the next byte, and the standard error of that over windows. The models also fill the holes with
the likeliest bytes, the masked one in 1, a quarter and all of as many forward passes as there are
bytes; `right` is the share of bytes that are those of the text, in the first `FILLED` windows.

    python -m benchmarks.holes MASKED|FILL NEXT TEXT [--hole BYTES...] [--out DIR]
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from arbcli.config.model import VOCABULARY
from arbcli.data.text import Text
from arbcli.families.masked.filling import EXTRA, led_in
from arbcli.families.masked.masking import hide
from arbcli.generation.load import load_model
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic, resolve_backend
from arbcli.model.language_model import LanguageModel
from benchmarks import results

FILLED = 1024
"""Windows whose holes are filled; losses have smaller errors with more."""


def next_loss(model: LanguageModel, ids: Tensor, hole: slice) -> Tensor:
    """Average the cross-entropy over each hole, by the bytes before it: (B, T) ids give (B,)."""
    losses = model.position_losses(ids[:, :-1], ids[:, 1:])
    return losses[:, hole.start - 1 : hole.stop - 1].mean(dim=1)


def masked_loss(
    model: LanguageModel, ids: Tensor, hole: slice, draws: int, step: int, *, right: bool
) -> Tensor:
    """Average the bound over each hole, with what is after it or without: (B,)."""
    total, symbol = torch.zeros(len(ids), device=ids.device), model.config.vocabulary
    for draw in range(draws):
        numbers = range(draw * len(ids), (draw + 1) * len(ids))
        given, targets = ids.clone(), torch.full_like(ids, -1)
        given[:, hole], targets[:, hole] = hide(
            ids[:, hole], symbol, seed=0, step=step, numbers=numbers, of=draws * len(ids)
        )
        if not right:
            given[:, hole.stop :] = symbol
        total += model.position_losses(given, targets).mean(dim=1) / draws
    return total


def ordered_loss(model: LanguageModel, ids: Tensor, hole: slice) -> Tensor:
    """Average the loss over each hole, filled from left to right with both sides known: (B,)."""
    total = torch.zeros(len(ids), device=ids.device)
    for place in range(hole.start, hole.stop):
        given, targets = ids.clone(), torch.full_like(ids, -1)
        given[:, place : hole.stop] = model.config.vocabulary
        targets[:, place] = ids[:, place]
        total += model.position_losses(given, targets).mean(dim=1)
    return total / (hole.stop - hole.start)


def filled_next(model: LanguageModel, ids: Tensor, hole: slice) -> Tensor:
    """Fill each hole with the likeliest bytes after the bytes before it: (B, T) ids."""
    given = ids.clone()
    given[:, hole] = 0
    for place in range(hole.start, hole.stop):
        given[:, place] = model(given)[:, place - 1].argmax(dim=-1)
    return given


def filled_masked(model: LanguageModel, ids: Tensor, hole: slice, passes: int) -> Tensor:
    """Fill each hole in some forward passes, the bytes of highest confidence first: (B, T) ids."""
    given = ids.clone()
    given[:, hole] = model.config.vocabulary
    hidden = torch.ones_like(ids[:, hole], dtype=torch.bool)
    for left in range(passes, 0, -1):
        likeliest = model(given)[:, hole].float().softmax(dim=-1).max(dim=-1)
        confidence = likeliest.values.masked_fill(~hidden, -1)
        now = -(-int(hidden[0].sum()) // left)
        places = confidence.argsort(dim=-1, descending=True, stable=True)[:, :now]
        given[:, hole] = given[:, hole].scatter(1, places, likeliest.indices.gather(1, places))
        hidden.scatter_(1, places, value=False)
    return given


def filled_after_both(model: LanguageModel, ids: Tensor, hole: slice) -> Tensor:
    """Fill each hole with the likeliest bytes, after both sides: (B, T) ids."""
    size, symbols = hole.stop - hole.start, model.config.vocabulary
    parts = ((row[: hole.start], torch.zeros_like(row[hole]), row[hole.stop :]) for row in ids)
    whole, given = torch.stack([led_in(*part, symbols) for part in parts]), ids.clone()
    for place in range(whole.shape[1] - size, whole.shape[1]):
        whole[:, place] = model(whole)[:, place - 1].argmax(dim=-1)
    given[:, hole] = whole[:, -size:]
    return given


def filled_loss(model: LanguageModel, ids: Tensor, hole: slice, *, right: bool) -> Tensor:
    """Average the loss over each hole after both sides, or after an empty right side: (B,)."""
    rows, size = [], hole.stop - hole.start
    for row in ids:
        after = row[hole.stop :] if right else row[:0]
        rows.append(led_in(row[: hole.start], row[hole], after, model.config.vocabulary))
    whole = torch.stack(rows)
    losses = model.position_losses(whole[:, :-1], whole[:, 1:].clamp(max=VOCABULARY - 1))
    return losses[:, -size:].mean(dim=1)


@torch.no_grad()
def compare(
    masked: LanguageModel, following: LanguageModel, text: Text, *,
    hole: int, windows: int, batch: int, draws: int,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Average the nats a byte of `windows` holes, spread evenly over a text.

    Returns:
        `nats_per_byte` of all ways; `excess`, that over the model of the next byte, of the others;
        `standard_error` of the excess; and `right`, the share of bytes that are those of the text
        if the likeliest are chosen.
    """
    in_order = not masked.config.is_masked
    context = min(masked.config.ctx - EXTRA * in_order, following.config.ctx)
    place = slice((context - hole) // 2, (context + hole) // 2)
    apart = (len(text) - context) // windows
    first, *others = ("fill",) if in_order else ("masked", "masked from left to right")
    kinds = ("next", first, f"{first} without the right side", *others)
    found: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    right: dict[str, list[Tensor]] = {}
    for begin in range(0, windows, batch):
        starts = [apart * number for number in range(begin, min(begin + batch, windows))]
        ids = text.window_batch(starts, context).to(masked.device).long()
        found["next"].append(next_loss(following, ids, place))
        for name, both in zip(kinds[1:3], (True, False), strict=True):
            if in_order:
                losses = filled_loss(masked, ids, place, right=both)
            else:
                losses = masked_loss(masked, ids, place, draws, begin, right=both)
            found[name].append(losses)
        if begin >= FILLED:
            continue
        filled = {"next": filled_next(following, ids, place)}
        if in_order:
            filled["fill"] = filled_after_both(masked, ids, place)
        for passes in () if in_order else sorted({1, -(-hole // 4), hole}):
            name = f"masked, {passes} pass{'es' * (passes > 1)}"
            filled[name] = filled_masked(masked, ids, place, passes)
        for name, made in filled.items():
            same = (made[:, place] == ids[:, place]).double().mean(dim=1)
            right.setdefault(name, []).append(same)
        if not in_order:
            found[kinds[3]].append(ordered_loss(masked, ids, place))
    whole = {kind: torch.cat(parts).double() for kind, parts in found.items()}
    excess = {kind: losses - whole["next"] for kind, losses in whole.items() if kind != "next"}
    return {
        "nats_per_byte": {kind: float(losses.mean()) for kind, losses in whole.items()},
        "excess": {kind: float(more.mean()) for kind, more in excess.items()},
        "standard_error": {kind: float(more.std()) / windows**0.5 for kind, more in excess.items()},
        "right": {kind: float(torch.cat(parts).mean()) for kind, parts in right.items()},
    }


def steps_of(run: Path) -> int:
    """Read how many steps a run was trained for."""
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def main() -> None:
    """Compare two runs, and print an object of JSON for each length of a hole."""
    parser = results.options("holes", __doc__.splitlines()[0])
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
    command = results.command_line("holes", args.masked.name, args.next.name, "TEXT")
    steps = {"run": steps_of(args.masked), "next": steps_of(args.next)}
    for hole in args.hole:
        with deterministic(), use_backend(resolve_backend(None, masked.device)):
            losses = compare(masked, following, text, hole=hole, **how)
        row = {"run": args.masked.name, "hole": hole, "steps": steps} | how | losses
        print(json.dumps(row), flush=True)
        results.save("holes", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()

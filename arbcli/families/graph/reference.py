"""The choices of codebooks and iterations in a reference, and their losses."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.families.graph.modeling import HALT_SUM, UNIT, Codebook, Iterated, Quantiser, row_scores

if TYPE_CHECKING:
    from arbcli.verify.reference import Reference

HALT_PRIOR = 0.25


def choose_rows(
    model: "Reference", name: str, book: Codebook, left: Tensor, right: Tensor
) -> Tensor:
    """Adopt the rows that the model chose, and judge them by all scores: `Codebook.choose`.

    Args:
        model: the reference.
        name: name of the codebook in the model.
        book: the codebook.
        left: (T, heads, n) float64, scores of the first halves of keys.
        right: (T, heads, m) float64, scores of the second halves.

    Returns:
        (T, heads, k) int64, rows of the table.
    """
    model_choice = model.model_choice(name)
    if model_choice is None:
        return Codebook.choose(book, left, right)
    all_scores = (left[..., :, None] + right[..., None, :]).flatten(-2)
    rows = model_choice[0][: len(left)]
    model.judge(row_scores(left, right, rows), all_scores)
    return rows


def choose_code(model: "Reference", name: str, book: Quantiser, z: Tensor) -> Tensor:
    """Adopt the codes that the model chose, and note their distances: `Quantiser.choose`.

    Args:
        model: the reference.
        name: name of the quantiser in the model.
        book: the quantiser.
        z: (T, width) float64.

    Returns:
        (T,) int64.
    """
    model_choice, chosen = model.model_choice(name), Quantiser.choose(book, z)
    if model_choice:
        closeness, chosen = book.closeness(z), model_choice[0][: len(z)].flatten()
        model.judge(closeness.gather(1, chosen[:, None]), closeness)
    model.note("commitment", name, (z - book.codes[chosen] / UNIT).square().mean(dim=1))
    return chosen


def halt(
    model: "Reference", name: str, part: Iterated, index: int, halted: Tensor, probability: Tensor
) -> Tensor:
    """Halt in the iterations in which the model did, and note their cost: `Iterated.halt`.

    Args:
        model: the reference.
        name: name of the iterated experts in the model.
        part: the iterated experts.
        index: number of the iteration.
        halted: (T,) float64, share of each position that has halted before.
        probability: (T,) float64, share that halts unless the rest does.

    Returns:
        (T,) float64, share that halts in this iteration.
    """
    model_choice, last = model.model_choice(name), index + 1 == len(part.adapters)
    if model_choice is None:
        share = Iterated.halt(part, index, halted, probability)
    else:
        iteration = model_choice[0][: len(halted)]
        running, halts = iteration >= index, iteration <= index
        if not last:
            total = (halted + probability).detach()[running]
            above, below = total.clamp(min=HALT_SUM), total.clamp(max=HALT_SUM)
            model.scores.append((total, torch.where(halts[running], above, below)))
        share = torch.where(halts | last, 1 - halted, probability) * running
    shares = model.notes.setdefault(name, [])
    shares.append(share)
    if last:
        model.note("ponder", name, ponder_costs(torch.stack(shares)))
    return share


def ponder_costs(shares: Tensor) -> Tensor:
    """Compute the KL divergence of (iterations, T) halting shares from the prior, (T,) in nats.

    By the prior, each iteration halts a quarter of the rest, and the last one all of it.
    """
    cost, remaining = shares.new_zeros(shares.shape[1]), 1.0
    for index, share in enumerate(shares):
        expected = remaining if index == len(shares) - 1 else remaining * HALT_PRIOR
        remaining -= expected
        cost = cost + share * torch.log(share.clamp(min=1e-6) / expected)
    return cost

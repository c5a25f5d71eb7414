"""The choices of an indexer in a reference, and its loss."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.families.compressed.modeling import CompressedAttention, Indexer

if TYPE_CHECKING:
    from arbcli.verify.reference import Reference


def limit(model: "Reference", name: str, part: Indexer, products: Tensor, sees: Tensor) -> Tensor:
    """Limit products to those above 0 in the model, as a rounding may change a sign.

    Args:
        model: the reference.
        name: name of the indexer in the model.
        part: the indexer.
        products: (N, heads, N) float64.
        sees: (N, N) bool mask of the entries that each group sees.

    Returns:
        (N, heads, N) float64.
    """
    model_choice, exact = model.model_choice(name), Indexer.limit(part, products, sees)
    if model_choice is None:
        return exact
    number, shown = len(products), sees[:, None].expand_as(products)
    positive = products * model_choice[1][:number, :, :number]
    model.products.append((positive.detach()[shown], exact.detach()[shown]))
    return positive


def choose_entries(
    model: "Reference", name: str, part: Indexer, scores: Tensor, sees: Tensor
) -> Tensor:
    """Adopt the entries that the model chose, and judge them: `Indexer.choose`.

    Args:
        model: the reference.
        name: name of the indexer in the model.
        part: the indexer.
        scores: (N, N) float64.
        sees: (N, N) bool mask of the entries that each group sees.

    Returns:
        (N, N) bool mask of the chosen entries.
    """
    model_choice, chosen = model.model_choice(name), Indexer.choose(part, scores, sees)
    if model_choice:
        best, chosen = chosen, torch.zeros_like(sees)
        for g, (row, visible) in enumerate(zip(scores.detach(), sees, strict=True)):
            picked = [j for j in model_choice[0][g].tolist() if j >= 0 and visible[j]]
            chosen[g, picked] = True
            mine = row.new_full((int(best[g].sum()),), -math.inf)  # of those missing
            mine[: len(picked)] = row[picked]
            model.judge(mine, row[visible])
    model.notes[name] = scores, chosen
    return chosen


def note_divergences(
    model: "Reference", name: str, part: CompressedAttention, q: Tensor, keys: Tensor, sees: Tensor
) -> Tensor:
    """Compute shares of attention, and note the divergence of each group's scores from them.

    A group that its text ends in only counts where the window ends there, too.

    Args:
        model: the reference.
        name: name of the attention in the model.
        part: the attention.
        q: (T, H, d) queries.
        keys: (N + T, G, d), entries and bytes.
        sees: (T, N + T) bool mask.

    Returns:
        (H, T, N + T) float64.
    """
    shares = CompressedAttention.shares(part, q, keys, sees)
    if f"{name}.indexer" not in model.notes:
        return shares
    scores, chosen = model.notes[f"{name}.indexer"]
    attended = shares.detach()[:, :, : len(scores)].sum(dim=0)
    length, slots = len(q), model.slots[model.stage_of(name)]
    terms = [attended.new_zeros(0)]
    for g, (row, visible) in enumerate(zip(scores, chosen, strict=True), 1):
        last = min((g + 1) * part.ratio - 1, max(slots, length))
        if last <= length:
            share = attended[g * part.ratio - 1 : last, visible].sum(dim=0)
            share = share / share.sum()
            learned = torch.log_softmax(row[visible], dim=0)
            terms.append((share * (share.log() - learned)).sum()[None])
    model.note("indexer", name, torch.cat(terms))
    return shares

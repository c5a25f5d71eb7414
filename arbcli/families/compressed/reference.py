"""Attention to the last positions, and to entries of several that an indexer may choose."""

import math

import torch
from torch import Tensor

from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.verify.parts.base import (
    Reading,
    Weights,
    norm,
    output_of,
    positions,
    sees_last,
    turn,
    under,
)


def compressed_attention(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Attend over the normalised stream h, (T, D); note the indexer's divergences."""
    config, site, place, m = (
        reading.config_of(CompressedAttentionConfig),
        reading.site,
        positions(h),
        reading.config_of(CompressedAttentionConfig).ratio,
    )
    heads, kv, size = config.heads, config.kv_heads, config.width(site)
    rotated, number = config.rotated(site), len(h) // m
    parts, gain = (heads * size, kv * size, kv * size), w.get("key_gain", h.new_ones(size))
    projected = (h @ w["projection"].T).tensor_split((parts[0], sum(parts[:2]), sum(parts)), dim=1)
    q, recent, value, gate = projected
    q = turn(norm(q.view(-1, heads, size)), place, rotated)
    recent = turn(norm(recent.view(-1, kv, size), gain), place, rotated)

    blocks = value[: number * m].view(number, m, kv * size)
    if config.pooling == "mean":
        pooled = blocks.mean(dim=1)
    else:
        share = (gate[: number * m].view(blocks.shape) + w["beta"].T).softmax(dim=1)
        pooled = (share * blocks).sum(dim=1)
    still = norm(pooled.view(number, kv, size))
    entries = turn(still * gain.flatten(), place[:number] * m, rotated)

    # what a group of positions, those after g complete entries, sees of the entries
    group, entry = torch.arange(number + 1, device=h.device)[:, None], place[:number]
    sees = (entry < group) & (entry >= group - config.entries(site))
    scores = None
    if config.top_k is not None and number:
        scores = _scores(under(w, "indexer"), h[m - 1 :: m], still, sees[1:], reading)
        sees[1:] = _choose(scores, sees[1:], reading)

    seen = torch.cat([sees[(place + 1) // m], sees_last(len(h), config.window, h.device)], dim=1)
    keys = torch.cat([entries, recent]).repeat_interleave(heads // kv, dim=1)
    products = torch.einsum("thd,shd->hts", q, keys) / math.sqrt(size)
    weights = torch.exp(products.masked_fill(~seen, -math.inf))
    weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(w["sink"])[:, None])
    y = turn(torch.einsum("hts,shd->thd", weights, keys), -place, rotated).flatten(1)
    if config.top_k is not None and max(reading.slots, len(h)) >= m:
        attended = weights.detach()[:, :, :number].sum(dim=0)
        if scores is not None:
            _note_divergences(scores, attended, sees, reading)
    return output_of(y, w, normalise=config.sub_norm)


def _scores(w: Weights, ends: Tensor, still: Tensor, sees: Tensor, reading: Reading) -> Tensor:
    """Score entries for each group by the position that completed the last of them.

    Args:
        w: weights of the indexer.
        ends: (N, D), these positions of the normalised stream.
        still: (N, kv_heads, d), entries that are not rotated.
        sees: (N, N) bool, which entries a group sees.
        reading: inputs of the attention.

    Returns:
        (N, N).
    """
    config, number = reading.config_of(CompressedAttentionConfig), positions(ends)
    heads, width, m = config.index_heads, config.index_width, config.ratio
    q, weight = (ends.detach() @ w["query"].T).split((heads * width, heads), dim=1)
    q = turn(norm(q.view(-1, heads, width)), number * m + m - 1, width // 2)
    keys = turn(norm(still.detach().flatten(1) @ w["key"].T), number * m, width // 2)
    products = torch.einsum("ghd,jd->ghj", q, keys)
    above = torch.relu(products)
    taken = reading.taken("indexer")
    if taken:  # a rounding may change a sign
        exact, above = above.detach(), products * taken[1][: len(ends), :, : len(ends)]
        shown = sees[:, None].expand_as(above)
        reading.judged.products.append((above.detach()[shown], exact[shown]))
    return (weight[..., None] * above).sum(dim=1) / math.sqrt(heads * width)


def _choose(scores: Tensor, sees: Tensor, reading: Reading) -> Tensor:
    """Choose `top_k` of the entries that each group sees: (N, N) bool."""
    chosen, taken = torch.zeros_like(sees), reading.taken("indexer")
    for g, (row, visible) in enumerate(zip(scores.detach(), sees, strict=True)):
        seen = visible.nonzero()[:, 0].tolist()
        best = sorted(zip(row[seen].tolist(), seen, strict=True), reverse=True)
        picked = [j for _, j in best[: reading.config_of(CompressedAttentionConfig).top_k]]
        if taken:
            mine = row.new_full((len(picked),), -math.inf)  # of those missing, or not there
            picked = sorted(set(taken[0][g].tolist()) & set(seen))
            mine[: len(picked)] = row[picked]
            reading.judged.judge(mine, row[seen])
        chosen[g, picked] = True
    return chosen


def _note_divergences(scores: Tensor, attended: Tensor, sees: Tensor, reading: Reading) -> None:
    """Note each group's divergence of shares of attention, (T, N) over heads, from scores.

    A group that its text ends in counts only where the window ends there, too.
    """
    m, length = reading.config_of(CompressedAttentionConfig).ratio, len(attended)
    terms = [attended.new_zeros(0)]
    for g in range(1, len(sees)):
        last = min((g + 1) * m - 1, max(reading.slots, length))
        if last <= length:
            share = attended[g * m - 1 : last, sees[g]].sum(dim=0)
            share = share / share.sum()
            learned = torch.log_softmax(scores[g - 1, sees[g]], dim=0)
            terms.append((share * (share.log() - learned)).sum()[None])
    reading.note("indexer", torch.cat(terms))

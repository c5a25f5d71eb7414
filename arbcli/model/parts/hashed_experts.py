"""Experts chosen by the text alone: a hash of the bytes that end at a position.

Nothing is learned, so nothing can collapse: the load is as even as n-grams are. Source: S. Roller
et al., "Hash Layers For Large Sparse Models", https://arxiv.org/abs/2106.04426.
"""

import torch
from torch import Tensor

from arbcli.model.parts.ngrams import KEY_BITS, MIX


def hashed_experts(keys: Tensor, experts: int, top_k: int) -> Tensor:
    """Choose experts by the n-gram that ends at each position; one before the text is one more.

    Every set of `top_k` experts is as likely as another.

    Args:
        keys: (B, T) int64, of `ngram_keys`.
        experts: how many there are.
        top_k: how many are chosen, all of them different.

    Returns:
        (B * T, top_k) int64.
    """
    key = keys.flatten()
    chosen: list[Tensor] = []
    for draw in range(top_k):  # one of those that are left, counted without those that are gone
        expert = (_mixed(key + (draw << 40)) * (experts - draw)) >> KEY_BITS
        if chosen:
            for gone in torch.stack(chosen, dim=1).sort(dim=1).values.unbind(dim=1):
                expert = expert + (expert >= gone)
        chosen.append(expert)
    return torch.stack(chosen, dim=1)


def _mixed(key: Tensor) -> Tensor:
    """Hash int64 keys to `KEY_BITS` bits; those of draws that follow one another are unrelated."""
    key = key * MIX
    key = (key ^ ((key >> 32) & 0xFFFFFFFF)) * MIX
    return (key >> 32) & ((1 << KEY_BITS) - 1)

"""Hash routing: experts are selected by the n-gram that ends at a position.

The routing is not learned, so it cannot collapse; the load is as even as the distribution of
n-grams. Source: S. Roller et al., "Hash Layers For Large Sparse Models",
https://arxiv.org/abs/2106.04426.
"""

import torch
from torch import Tensor

from arbcli.model.ngrams import KEY_BITS, MIX


def hashed_experts(keys: Tensor, experts: int, top_k: int) -> Tensor:
    """Select experts by the n-gram that ends at each position.

    All sets of `top_k` experts are equally likely.

    Args:
        keys: (B, T) int64, from `ngram_keys`; -1, before a complete n-gram, counts as another key.
        experts: number of experts.
        top_k: number of experts to select, all different.

    Returns:
        (B * T, top_k) int64.
    """
    key = keys.flatten()
    chosen: list[Tensor] = []
    for draw in range(top_k):  # without replacement: an index among the remaining experts
        expert = (_mixed(key + (draw << 40)) * (experts - draw)) >> KEY_BITS
        if chosen:
            for drawn in torch.stack(chosen, dim=1).sort(dim=1).values.unbind(dim=1):
                expert = expert + (expert >= drawn)
        chosen.append(expert)
    return torch.stack(chosen, dim=1)


def _mixed(key: Tensor) -> Tensor:
    """Hash int64 keys to `KEY_BITS` bits, uncorrelated between successive draws."""
    key = key * MIX
    key = (key ^ ((key >> 32) & 0xFFFFFFFF)) * MIX
    return (key >> 32) & ((1 << KEY_BITS) - 1)

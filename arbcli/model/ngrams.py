"""Hashes of n-grams of bytes."""

import torch
from torch import Tensor
from torch.nn import functional

MIX = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio in 64 bits, as a signed integer. Source: D. Knuth, TAOCP 3, 6.4."""
KEY_ORDER = 3
"""Length of the n-grams of keys; single bytes would be uneven, as a seventh of a text is spaces."""
KEY_BITS = 31
HISTORY = 5
"""Number of bytes before a position that parts read."""


def ngram_ids(ids: Tensor, num_rows: int, orders: tuple[int, ...]) -> Tensor:
    """Hash the n-grams that end at each byte to rows of a table.

    Args:
        ids: (B, T) int64 bytes; a negative one is before the beginning of the text.
        num_rows: number of rows of the table.
        orders: lengths of the n-grams.

    Returns:
        (B, T, len(orders)) int64 in 0..num_rows-1, or -1 for an n-gram that begins before the text.
    """
    row_ids, key, complete = [], torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
    for back in range(max(orders)):
        byte = functional.pad(ids, (back, 0), value=-1)[:, : ids.shape[1]]
        key, complete = key * 257 + byte + 1, complete & (byte >= 0)
        if back + 1 in orders:
            mixed = (key + ((back + 1) << 40)) * MIX
            row = (((mixed >> 32) & 0x7FFFFFFF) * num_rows) >> 31  # the high bits are mixed best
            row_ids.append(torch.where(complete, row, -1))
    return torch.stack(row_ids, dim=-1)


def ngram_keys(text: Tensor) -> Tensor:
    """Hash the `KEY_ORDER`-gram that ends at each byte of (B, T) to `KEY_BITS` bits, or -1."""
    return ngram_ids(text, 1 << KEY_BITS, (KEY_ORDER,))[..., 0]

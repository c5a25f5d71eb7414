"""Rows of a table that the text's n-grams are hashed to, by Python's integers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arbcli.verify.parts.base import Reading, Weights, norm

ORDERS = (2, 3, 4)
MIX = 0x9E3779B97F4A7C15


def ngrams(text: Sequence[int], order: int) -> list[list[int]]:
    """List the n-gram that ends at each byte; -1 is before the text."""
    padded = [-1] * (order - 1) + list(text)
    return [padded[end : end + order] for end in range(len(text))]


def ngram_row(history: list[int], num_rows: int) -> int:
    """Hash the bytes of one n-gram; -1 if one of them is before the text."""
    if min(history) < 0:
        return -1
    key = 0
    for byte in reversed(history):
        key = key * 257 + byte + 1
    mixed = (key + (len(history) << 40)) * MIX % 2**64
    return ((mixed >> 32) % 2**31 * num_rows) >> 31


def sequencer(w: Weights, reading: Reading) -> Tensor:
    """Add up the rows of 2-, 3- and 4-grams: what is added to the embedding, (T, D)."""
    table = w["table"]
    y = table.new_zeros(len(reading.text), table.shape[1])
    for order in ORDERS:
        row_numbers = [ngram_row(history, len(table)) for history in ngrams(reading.text, order)]
        rows = torch.tensor(row_numbers, device=table.device)
        y = y + table[rows.clamp(min=0)] * (rows >= 0)[:, None]
    return norm(y, w.get("norm")) @ w["projection"].T

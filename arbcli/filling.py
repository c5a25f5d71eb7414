"""Windows with a hole, for models that read from left to right: the text of the hole comes last.

    [suffix] LENGTH, text after the hole, [prefix] text before the hole, [middle] text of the hole

The three marks are symbols beyond the vocabulary of V, which the model reads and never predicts;
LENGTH is that of the hole, in two digits of base V. So the hole is predicted with both sides known,
by the same causal model, and next to the text before it. Every other window is left as it is: the
model continues a text as well. The lengths of holes are spread evenly on a logarithmic scale.
Source: M. Bavarian et al., "Efficient Training of Language Models to Fill in the Middle",
https://arxiv.org/abs/2207.14255.
"""

import struct
from collections.abc import Sequence
from hashlib import shake_256

import torch
from torch import Tensor

from arbcli.config.model import FILL_SYMBOLS

EXTRA = FILL_SYMBOLS + 2
"""Symbols of a window besides its text."""
LEAD = 8
"""Symbols before a hole that are read after the mark: the first ones after it are hard to predict,
as the mark stands between them and the text that they continue."""


def in_layout(before: Tensor, hole: Tensor, after: Tensor, vocabulary: int) -> Tensor:
    """Put the parts of a text, (N,) int64 each, in the order in which a model reads them.

    Args:
        before: text before the hole.
        hole: text of the hole.
        after: text after the hole.
        vocabulary: V; the hole has fewer than V * V symbols.

    Returns:
        (N,) int64, `EXTRA` more than the parts have.
    """
    suffix, prefix, middle = range(vocabulary, vocabulary + FILL_SYMBOLS)
    first = before.new_tensor([suffix, *divmod(len(hole), vocabulary)])
    marks = before.new_tensor([prefix, middle])
    return torch.cat([first, after, marks[:1], before, marks[1:], hole])


def led_in(before: Tensor, hole: Tensor, after: Tensor, vocabulary: int) -> Tensor:
    """Put a hole in the order of `in_layout`, as the end of one that begins `LEAD` symbols sooner.

    Args:
        before: text before the hole; all of it is read after the mark if it is shorter than `LEAD`.
        hole: text of the hole.
        after: text after the hole.
        vocabulary: V.

    Returns:
        (N,) int64, as many as `in_layout` makes; the hole's symbols are the last ones.
    """
    begin = max(0, len(before) - LEAD)
    return in_layout(before[:begin], torch.cat([before[begin:], hole]), after, vocabulary)


def cut(
    ids: Tensor, vocabulary: int, *, seed: int, step: int, numbers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Move a hole to the end in every other window, by a hash of seed, step and window.

    Args:
        ids: (B, T + 1) int64, T > `EXTRA`. The last `EXTRA` symbols of a window with a hole are
            left out.
        vocabulary: V.
        seed: any integer.
        step: number of the draw; odd steps move holes in the other half of the windows.
        numbers: of the windows, B of them.

    Returns:
        The model's inputs and targets, (B, T) int64, contiguous: marks and lengths have
        -1, and count for nothing.
    """
    size, rows = ids.shape[1] - EXTRA, []
    for row, number in zip(ids, numbers, strict=True):
        if (number + step) % 2 == 0:
            rows.append((row, row))
            continue
        draw = shake_256(f"arb holes {seed} {step} {number}".encode()).digest(16)
        share, place = (word / 2**64 for word in struct.unpack("<QQ", draw))
        length = min(int((size + 1) ** share), size)
        begin = min(int(place * (size - length + 1)), size - length)
        parts = row[:begin], row[begin : begin + length], row[begin + length : size]
        given = in_layout(*parts, vocabulary)
        learnt = given.masked_fill(given >= vocabulary, -1)
        learnt[1:3] = -1
        rows.append((given, learnt))
    given, learnt = (torch.stack(part) for part in zip(*rows, strict=True))
    return given[:, :-1].contiguous(), learnt[:, 1:].contiguous()

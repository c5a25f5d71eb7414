"""Fill in the middle: windows with a hole, whose text is moved to the end, for causal models.

    [suffix] LENGTH, text after the hole, [prefix] text before the hole, [middle] text of the hole

The three marks are symbols beyond the vocabulary of V, which the model reads and never predicts;
LENGTH is the length of the hole, as two digits in base V. A causal model can so predict the hole
with both sides known, directly after the text before it. Every other window is unchanged, so that
the model also learns to continue a text. The lengths of holes are log-uniform.
Source: M. Bavarian et al., "Efficient Training of Language Models to Fill in the Middle",
https://arxiv.org/abs/2207.14255.
"""

import struct
from collections.abc import Sequence
from hashlib import shake_256
from typing import Any

import torch
from torch import Tensor

from arbcli.config.model import FILL_SYMBOLS

EXTRA = FILL_SYMBOLS + 2
"""Number of symbols that the layout adds to a window."""
LEAD = 8
"""Number of symbols before a hole that are placed after its mark: the first symbols after the mark
are hard to predict, as it separates them from the text that they continue."""


def lay_out(before: Tensor, hole: Tensor, after: Tensor, vocabulary: int) -> Tensor:
    """Return the parts of a text in the order in which a model reads them, with marks.

    Args:
        before: text before the hole, (L,) int64.
        hole: text of the hole, (M,) int64, M < V * V.
        after: text after the hole, (R,) int64.
        vocabulary: V.

    Returns:
        (L + M + R + `EXTRA`,) int64.
    """
    suffix, prefix, middle = range(vocabulary, vocabulary + FILL_SYMBOLS)
    first = before.new_tensor([suffix, *divmod(len(hole), vocabulary)])
    marks = before.new_tensor([prefix, middle])
    return torch.cat([first, after, marks[:1], before, marks[1:], hole])


def led_in(before: Tensor, hole: Tensor, after: Tensor, vocabulary: int) -> Tensor:
    """Lay out a text like `lay_out`, as if the hole began `LEAD` symbols earlier.

    Args:
        before: text before the hole, (L,) int64; all of it is read after the mark if it is shorter
            than `LEAD`.
        hole: text of the hole, (M,) int64.
        after: text after the hole, (R,) int64.
        vocabulary: V.

    Returns:
        (N,) int64, with the length of `lay_out`; the hole's symbols are the last ones.
    """
    begin = max(0, len(before) - LEAD)
    return lay_out(before[:begin], torch.cat([before[begin:], hole]), after, vocabulary)


def training_windows(
    drawn: tuple[Tensor, ...], vocabulary: int, *, of: int, **draw: Any
) -> tuple[Tensor, Tensor]:
    """Move holes of windows, given with their next symbols, to their ends: see `cut`."""
    return cut(torch.cat([drawn[0], drawn[1][:, -1:]], dim=1), vocabulary, **draw)


def cut(
    ids: Tensor, vocabulary: int, *, seed: int, step: int, numbers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Move a hole to the end of every other window; its place is a hash of seed, step and window.

    Args:
        ids: (B, T + 1) int64, T > `EXTRA`. The last `EXTRA` symbols of a window with a hole are
            dropped.
        vocabulary: V.
        seed: any integer.
        step: number of the draw; odd steps use the other half of the windows.
        numbers: numbers of the B windows.

    Returns:
        The model's inputs and targets, (B, T) int64, contiguous; targets are -1 at marks and
        lengths, which do not contribute to the loss.
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
        inputs = lay_out(*parts, vocabulary)
        targets = inputs.masked_fill(inputs >= vocabulary, -1)
        targets[1:3] = -1
        rows.append((inputs, targets))
    inputs, targets = (torch.stack(part) for part in zip(*rows, strict=True))
    return inputs[:, :-1].contiguous(), targets[:, 1:].contiguous()


def learnt_symbols(context: int, *, step: int, numbers: Sequence[int]) -> int:
    """Return the number of targets with a loss that `cut` returns for windows of T = `context`."""
    holed_texts = sum((number + step) % 2 for number in numbers)
    return len(numbers) * context - holed_texts * (EXTRA - 1)  # the first mark is never a target

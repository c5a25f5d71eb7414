"""Cross-entropy of a vocabulary in chunks of symbols: logits of one chunk are there at a time.

Forward, each chunk adds to the logarithm of a row's sum of exponentials. Backward, the logits of a
chunk are computed again and become their gradient in place.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import row_chunks

ELEMENTS = {"cuda": 2**24}
"""Logits that are in float32 at a time, by kind of device; elsewhere as many as a cache holds."""


def add_symbols_(total: Tensor, of_target: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Add a chunk of symbols to the sums of rows, in place.

    Args:
        total: (M,) float32, the logarithm of the sum of exponentials so far; -inf before the first.
        of_target: (M,) float32, to which the logit of the target is added if it is in the chunk.
        logits: (M, N) float32 or bfloat16, of the chunk.
        targets: (M,) int64, counted from the first symbol of the chunk; any others are elsewhere.
    """
    for rows in _parts(logits):
        part, place = logits[rows].float(), targets[rows]
        inside = (place >= 0) & (place < part.shape[1])
        found = part.gather(1, place.clamp(0, part.shape[1] - 1)[:, None])[:, 0]
        of_target[rows] += torch.where(inside, found, 0)
        highest = part.amax(dim=1)
        sums = (part - highest[:, None]).exp_().sum(dim=1)
        total[rows] = torch.logaddexp(total[rows], sums.log_().add_(highest))


def grade_symbols_(logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor) -> None:
    """Turn the logits of a chunk of symbols into the gradient of scaled losses, in place.

    Args:
        logits: (M, N) float32 or bfloat16.
        targets: as of `add_symbols_`.
        total: (M,) float32, what all chunks made of it.
        scale: (M,) float32, of each row's loss.
    """
    symbols = torch.arange(logits.shape[1], device=logits.device)
    for rows in _parts(logits):
        shares = (logits[rows].float() - total[rows, None]).exp_()
        shares -= (symbols == targets[rows, None]).float()
        logits[rows] = shares.mul_(scale[rows, None])


def _parts(logits: Tensor) -> Iterator[slice]:
    return row_chunks(logits, ELEMENTS.get(logits.device.type, 1 << 18))

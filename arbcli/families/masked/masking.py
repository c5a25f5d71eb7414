"""Masking of windows: the choice of symbols that a masked model has to predict.

In a window of T symbols, k are hidden: k is uniform in 1 to T, and so is the choice of k symbols.
With the mean of -ln p over the hidden symbols, given all others, the bound

    -ln p(window) / T  <=  E over k, E over choices of k symbols  of that mean

is in nats per symbol. This is masked diffusion, which hides each symbol with probability t and
weighs losses by 1 / t, with the random number of hidden symbols replaced by its expectation
t * T = k. The k of several windows are spread evenly over 1 to T with a random offset, which leaves
the expectation unchanged.
Sources: J. Shi et al., "Simplified and Generalized Masked Diffusion for Discrete Data",
https://arxiv.org/abs/2406.04329; E. Hoogeboom et al., "Autoregressive Diffusion Models",
https://arxiv.org/abs/2110.02037, eq. 5.
"""

import struct
from collections.abc import Sequence
from hashlib import shake_256
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2
"""Golden ratio conjugate: its first n multiples modulo 1 are spread evenly, for any n."""


def training_windows(
    drawn: tuple[Tensor, ...], vocabulary: int, **draw: Any
) -> tuple[Tensor, Tensor]:
    """Hide symbols of windows of a text, whose first tensor has them: see `hide`."""
    return hide(drawn[0], vocabulary, **draw)


def bound_weights(targets: Tensor) -> Tensor:
    """Return the weight of each of a window's k hidden symbols in the bound, T / k: (B, 1)."""
    hidden = targets >= 0
    return targets.shape[1] / hidden.sum(dim=1, keepdim=True)


def hide(
    ids: Tensor, symbol: int, *, seed: int, step: int, numbers: Sequence[int], of: int
) -> tuple[Tensor, Tensor]:
    """Hide symbols of windows, chosen by a hash of the seed, the step and the window's number.

    Args:
        ids: (B, T) int64.
        symbol: the mask symbol, which replaces hidden symbols.
        seed: any integer.
        step: number of the draw; each has another offset of the hidden shares.
        numbers: numbers of the B windows, each below `of`.
        of: number of windows among which the hidden shares are spread evenly.

    Returns:
        The model's inputs, and its targets: the hidden symbols, and -1 elsewhere. Both have the
        shape and dtype of `ids`, and are contiguous.
    """
    length = ids.shape[1]
    key = f"arb masks {seed}"
    (first,) = struct.unpack("<Q", shake_256(key.encode()).digest(8))
    offset = first / 2**64 + step * GOLDEN
    counts = [1 + min(int((offset + number / of) % 1 * length), length - 1) for number in numbers]
    words = [shake_256(f"{key} {step} {n}".encode()).digest(8 * length) for n in numbers]
    draws = np.frombuffer(b"".join(words), np.int64).reshape(-1, length)
    # numpy sorts in this thread; for torch's threads a batch is too small
    last = np.take_along_axis(np.sort(draws, axis=1), np.array(counts)[:, None] - 1, axis=1)
    hidden = torch.from_numpy(draws <= last).to(ids.device)
    return ids.masked_fill(hidden, symbol), ids.masked_fill(~hidden, -1)

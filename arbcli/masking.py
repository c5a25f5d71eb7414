"""Hidden symbols of windows: which ones a masked model has to predict.

Of a window of T symbols k are hidden, any k of them equally likely, and k is equally likely 1 to T.
With the mean over the hidden ones of -ln p, given all others, the bound

    -ln p(window) / T  <=  E over k, E over which k  of that mean

is in nats a symbol: k / T is the t of a diffusion that hides each symbol with probability t, whose
losses weigh 1 / t, once what chance hides is replaced by what it hides on average. The k of several
windows are spread evenly over 1 to T, beginning anywhere, which leaves the expectation as it is.
Sources: J. Shi et al., "Simplified and Generalized Masked Diffusion for Discrete Data",
https://arxiv.org/abs/2406.04329; E. Hoogeboom et al., "Autoregressive Diffusion Models",
https://arxiv.org/abs/2110.02037, eq. 5.
"""

import struct
from array import array
from collections.abc import Sequence
from hashlib import shake_256

import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, modulo 1, are spread evenly, however many there are."""


def hide(
    ids: Tensor, symbol: int, *, seed: int, step: int, numbers: Sequence[int], of: int
) -> tuple[Tensor, Tensor]:
    """Hide symbols of windows; which ones is a hash of the seed, the step and a window's number.

    Args:
        ids: (B, T) int64.
        symbol: put in the place of those hidden.
        seed: any integer.
        step: number of the draw; the shares that are hidden begin elsewhere in every one.
        numbers: of the windows, B of those below `of`.
        of: windows among which the shares are spread evenly.

    Returns:
        The model's input, and its targets: the hidden symbols, and -1 elsewhere. Both have the
        shape and dtype of `ids`, and are contiguous.
    """
    length = ids.shape[1]
    key = f"arb masks {seed}"
    (first,) = struct.unpack("<Q", shake_256(key.encode()).digest(8))
    begin = first / 2**64 + step * GOLDEN
    counts = [1 + min(int((begin + number / of) % 1 * length), length - 1) for number in numbers]
    words = [shake_256(f"{key} {step} {n}".encode()).digest(8 * length) for n in numbers]
    draws = torch.frombuffer(bytearray().join(words), dtype=torch.int64).view(-1, length)
    rank = draws.argsort(dim=1).argsort(dim=1)
    most = torch.frombuffer(array("q", counts), dtype=torch.int64)
    hidden = (rank < most[:, None]).to(ids.device)
    return ids.masked_fill(hidden, symbol), ids.masked_fill(~hidden, -1)

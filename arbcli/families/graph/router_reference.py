"""The router over taps of the stream."""

import torch
from torch import Tensor

from arbcli.verify.parts.base import Weights, norm

BIAS = 3.0
"""Added to the score of the stream as it ends."""


def router(w: Weights, taps: list[Tensor]) -> Tensor:
    """Mix (T, D) taps by scores of the first, which is the stream as it ends."""
    scores = norm(taps[0], w.get("norm")) @ w["scores"].T
    bias = torch.zeros_like(scores)
    bias[:, 0] = BIAS
    shares = (scores + bias).softmax(dim=1)
    return (shares[..., None] * torch.stack(taps, dim=1)).sum(dim=1)

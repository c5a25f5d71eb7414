"""Half of each vector from the position before."""

import torch
from torch import Tensor

from arbcli.verify.parts.base import Reading, Weights


def shift(w: Weights, _x: Tensor, h: Tensor, _reading: Reading) -> Tensor:
    """Mix each position of the normalised stream h, (T, D), with the one before."""
    u = h @ w["input"].T
    half = u.shape[1] // 2
    rows = [
        torch.cat((u[t, :half], u[t - 1, half:] if t else torch.zeros_like(u[0, half:])))
        for t in range(len(u))
    ]
    return torch.stack(rows) @ w["output"].T

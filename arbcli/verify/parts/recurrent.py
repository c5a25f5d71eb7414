"""A gated linear recurrence, a position at a time."""

import torch
from torch import Tensor

from arbcli.config.parts.recurrent import RecurrentConfig
from arbcli.verify.parts.base import Reading, Weights


def recurrent(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Mix positions of the normalised stream h, (T, D)."""
    heads, dim = reading.config_of(RecurrentConfig).heads, h.shape[1]
    u, z, g = (h @ w["input"].T).split((dim, dim, heads), dim=1)
    kept = torch.sigmoid(g).repeat_interleave(dim // heads, dim=1)
    mean, rows = torch.zeros_like(u[0]), []
    for t in range(len(h)):
        mean = kept[t] * mean + (1 - kept[t]) * u[t]
        rows.append(mean)
    return (z * torch.sigmoid(z) * torch.stack(rows)) @ w["output"].T

"""Mamba-2, a position at a time."""

import torch
from torch import Tensor

from arbcli.families.mamba.config import EXPAND, MambaConfig
from arbcli.verify.parts.base import Reading, Weights, norm

TAPS = 4


def mamba(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Mix positions of the normalised stream h, (T, D)."""
    config, inner = reading.config_of(MambaConfig), EXPAND * h.shape[1]
    heads, states = EXPAND * config.heads, config.states
    parts = (inner, inner + 2 * states, heads)
    z, mixed, dt = (h @ w["projection"].T).split(parts, dim=1)
    before = torch.cat([mixed.new_zeros(TAPS - 1, mixed.shape[1]), mixed])
    mixed = torch.stack([w["taps"][:, i] * before[i : i + len(h)] for i in range(TAPS)]).sum(0)
    mixed = mixed * torch.sigmoid(mixed)
    u, b, c = mixed.split((inner, states, states), dim=1)
    u = u.view(-1, heads, inner // heads)
    step = torch.log1p(torch.exp(dt + w["bias"][:, 0]))
    fading = torch.exp(-torch.exp(w["rate"][:, 0]) * step)
    state, y = h.new_zeros(heads, states, inner // heads), []
    for t in range(len(h)):
        new = step[t, :, None, None] * b[t, None, :, None] * u[t, :, None]
        state = fading[t, :, None, None] * state + new
        y.append((c[t, None, :, None] * state).sum(dim=1) + w["skip"] * u[t])
    y = z * torch.sigmoid(z) * torch.stack(y).flatten(1)
    return norm(y, w.get("gate")) @ w["output"].T

"""Mamba-2 in plain PyTorch, for Transformers."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.interop.huggingface.modeling_core import (
    Packed,
    PartSpec,
    Reading,
    Settings,
    norm,
    vector,
    wide,
)

EXPAND, TAPS = 2, 4
CHUNK = 64
"""Positions whose products are computed together."""


class Mamba(nn.Module):
    """S[t] = exp(-exp(A) dt[t]) S[t - 1] + dt[t] B[t] u[t] and y[t] = C[t] S[t] + D u[t]."""

    name, norm_name = "mamba", "norm"

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.inner, self.heads, self.states = (
            EXPAND * spec.dim,
            EXPAND * part["heads"],
            part["states"],
        )
        self.mixed = self.inner + 2 * self.states
        self.projection = Packed(self.inner + self.mixed + self.heads, spec.dim, spec)
        self.taps = nn.Parameter(torch.empty(self.mixed, TAPS))
        self.rate, self.bias, self.skip = (vector(self.heads) for _ in range(3))
        self.output = Packed(spec.dim, self.inner, spec)

    def forward(self, _x: Tensor, h: Tensor, _reading: Reading) -> Tensor:
        """Mix positions of the normalised stream, (T, D)."""
        z, mixed, dt = self.projection(h).split((self.inner, self.mixed, self.heads), dim=1)
        padded = functional.pad(mixed.T, (TAPS - 1, 0))
        mixed = functional.conv1d(padded, self.taps[:, None], groups=self.mixed).T
        sizes = self.inner, self.states, self.states
        u, b, c = wide(functional.silu(mixed)).split(sizes, dim=1)
        u = u.view(len(h), self.heads, -1)
        dt = functional.softplus(wide(dt) + wide(self.bias))
        decay = -wide(self.rate).exp() * dt
        y = scan(decay, dt[..., None] * u, b, c) + wide(self.skip)[:, None] * u
        y = functional.silu(wide(z)) * y.flatten(1)
        return self.output(norm(y).to(h.dtype))


def scan(decay: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute y[t] = c[t] S[t] of S[t] = exp(decay[t]) S[t - 1] + b[t] u[t], in chunks.

    Args:
        decay: (T, H) logarithms.
        u: (T, H, P).
        b: (T, S), of all heads.
        c: (T, S), of all heads.

    Returns:
        (T, H, P).
    """
    state, rows = u.new_zeros(u.shape[1], b.shape[1], u.shape[2]), []
    chunks = (part.split(CHUNK) for part in (decay, u, b, c))
    for decay, u, b, c in zip(*chunks, strict=True):
        total = decay.cumsum(dim=0)  # (t, H), the decay of the state before the chunk
        later = torch.ones(len(u), len(u), dtype=torch.bool, device=u.device).triu(1)[..., None]
        apart = (total[:, None] - total).masked_fill(later, -torch.inf).exp()
        shares = (c @ b.T)[..., None] * apart  # (t, s, H)
        y = torch.einsum("tsh,shp->thp", shares, u)
        rows.append(y + torch.einsum("tn,hnp,th->thp", c, state, total.exp()))
        left = (total[-1] - total).exp()
        state = total[-1].exp()[:, None, None] * state + torch.einsum("sn,shp,sh->hnp", b, u, left)
    return torch.cat(rows)

"""Stages around chunks in plain PyTorch, for Transformers."""

import torch
from torch import Tensor, nn

from arbcli.interop.huggingface.modeling_core import (
    Inner,
    Packed,
    PartSpec,
    Reading,
    Settings,
    Stack,
    norm,
    wide,
)

SPACES = tuple(b" \t\n\v\f\r")
MIN_SHARE = 1e-4
EPS = 1e-6


class Router(nn.Module):
    """Computes how likely a chunk begins, from the queries and keys of neighbours."""

    def __init__(self, spec: PartSpec) -> None:
        super().__init__()
        self.query_key = Packed(2 * spec.dim, spec.dim, spec)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (T,) float32 probabilities from the normalised stream, (T, D)."""
        q, k = wide(self.query_key(x)).chunk(2, dim=1)
        u, v = wide(x)[:-1] + q[:-1], wide(x)[1:] + k[1:]
        lengths = (u.square().sum(dim=1) + EPS) * (v.square().sum(dim=1) + EPS)
        p = (1 - (u * v).sum(dim=1) / lengths.sqrt()) / 2
        return torch.cat((p.new_ones(1), p))


class Stage(nn.Module):
    """Encoder, chunks with the stages inside, and decoder."""

    def __init__(self, stage: Settings, spec: PartSpec, inner: int) -> None:
        super().__init__()
        self.chunking = stage["chunking"]
        self.encoder = Stack(stage["before"], stage, spec)
        self.router = Router(spec) if self.chunking["boundaries"] == "learned" else None
        self.inward = Packed(inner, spec.dim, spec)
        self.outward = Packed(spec.dim, inner, spec)
        self.residual = Packed(spec.dim, spec.dim, spec)
        self.decoder = Stack(stage["after"], stage, spec)

    def forward(self, x: Tensor, reading: Reading, inside: Inner) -> Tensor:
        """Pass the stream, (T, D), through the stage, and chunks through those inside."""
        x = norm(self.encoder(x, reading))
        p = self.router(x) if self.router else self._begins(reading, len(x)).to(wide(x))
        starts = self.starts(p)
        z = inside(
            self.inward(x[starts]), reading._replace(position_ids=reading.position_ids[starts])
        )
        z = self.outward(norm(z))
        x = spread(wide(z), p, starts).to(x.dtype) + self.residual(x)
        return self.decoder(x, reading)

    def starts(self, p: Tensor) -> Tensor:
        """Return the positions that begin chunks, by (T,) probabilities."""
        return (p > 0.5).nonzero()[:, 0]

    def _begins(self, reading: Reading, length: int) -> Tensor:
        """Find the positions that begin chunks without a router, (T,) bool."""
        if self.chunking["boundaries"] == "every":
            position_ids = torch.arange(length, device=reading.position_ids.device)
            return position_ids % self.chunking["length"] == 0
        space = torch.isin(reading.text, torch.tensor(SPACES, device=reading.text.device))
        begins = torch.ones_like(space)
        begins[1:] = space[:-1] & ~space[1:]
        return begins


def spread(z: Tensor, p: Tensor, starts: Tensor) -> Tensor:
    """Smooth (C, D) chunks, which begin at `starts`, and give each position that of its own."""
    shares, means, mean = p[starts].clamp(MIN_SHARE, 1 - MIN_SHARE), [], torch.zeros_like(z[0])
    for share, chunk in zip(shares, z, strict=True):
        mean = share * chunk + (1 - share) * mean
        means.append(mean)
    begins = torch.zeros_like(p, dtype=torch.int64)
    begins[starts] = 1
    confidence = torch.where(begins > 0, p, 1 - p)
    straight_through = 1 + (confidence - confidence.detach())  # 1, with a gradient
    return straight_through[:, None] * torch.stack(means)[begins.cumsum(dim=0) - 1]

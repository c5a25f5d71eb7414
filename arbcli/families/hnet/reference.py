"""Chunks: their boundaries, and what each position reads of them; without spare slots."""

import torch
from torch import Tensor

from arbcli.families.hnet.config import ChunkingConfig
from arbcli.verify.parts.base import Reading, Weights

SPACES = b" \t\n\v\f\r"
LEAST_SHARE = 1e-4


def boundaries(w: Weights, x: Tensor, reading: Reading) -> tuple[Tensor, list[bool]]:
    """Compute boundary probabilities and boundaries of the positions of a normalised x, (T, D).

    Args:
        w: weights of the stage.
        x: the stream.
        reading: inputs of the stage, with the configuration of its chunks.
    """
    config, length = reading.config_of(ChunkingConfig), len(x)
    if config.boundaries == "learned":
        q, k = w["router.query_key"].chunk(2)
        u, v = x[:-1] + x[:-1] @ q.T, x[1:] + x[1:] @ k.T
        lengths = (u.square().sum(dim=1) + 1e-6) * (v.square().sum(dim=1) + 1e-6)
        p = (1 - (u * v).sum(dim=1) / lengths.sqrt()) / 2
        p = torch.cat([p.new_ones(1), p])
        begins, taken = p > 0.5, reading.taken("router")
        if taken:
            begins = taken[0][:length]
            either = torch.stack([1 - p, p], dim=1)
            reading.judged.judge(either.gather(1, begins.long()[:, None]), either)
        return p, begins.tolist()
    if config.boundaries == "every":
        places = [t % config.length == 0 for t in range(length)]
    else:
        space = [byte in SPACES for byte in reading.text]
        places = [t == 0 or (space[t - 1] and not space[t]) for t in range(length)]
    return torch.tensor(places, dtype=torch.float64, device=x.device), places


def spread(z: Tensor, p: Tensor, starts: list[int], residual: Tensor) -> Tensor:
    """Smooth chunks, and add to every position that of its own.

    Args:
        z: (C, D), what the stage inside gives for chunks.
        p: (T,), how likely chunks begin.
        starts: positions that the chunks begin with.
        residual: (T, D).
    """
    means, mean = [], torch.zeros_like(z[0])
    for chunk, t in enumerate(starts):
        share = p[t].clamp(LEAST_SHARE, 1 - LEAST_SHARE)
        mean = share * z[chunk] + (1 - share) * mean
        means.append(mean)
    begins = torch.zeros_like(p, dtype=torch.bool)
    begins[starts] = True
    confidence = torch.where(begins, p, 1 - p)
    straight_through = confidence + (1 - confidence).detach()
    owner = begins.long().cumsum(dim=0) - 1
    return straight_through[:, None] * torch.stack(means)[owner] + residual


def ratio_loss(p: Tensor, begins: Tensor, length: int) -> Tensor:
    """Measure how far chunks are from `length` positions on average; 1 where they are."""
    f, g = begins.mean(), p.mean()
    return length / (length - 1) * ((length - 1) * f * g + (1 - f) * (1 - g))

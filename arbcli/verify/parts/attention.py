"""Attention to all positions, or to those of a window."""

import math

import torch
from torch import Tensor

from arbcli.verify.parts.base import Reading, Weights, norm, positions, sees_last, turn


def attention(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Attend over the normalised stream h, (T, D)."""
    config, site = reading.config, reading.site
    qkv = (h @ w["qkv"].T).view(len(h), 3, config.heads, config.head_width(site))
    q, k, v = qkv.unbind(dim=1)
    q, k = (norm(turn(part, positions(h))) for part in (q, k))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    sees = sees_last(len(h), min(config.window or site.ctx, site.ctx), h.device)
    shares = scores.masked_fill(~sees, -math.inf).softmax(dim=-1)
    y = torch.einsum("hts,shd->thd", shares, v).flatten(1)
    return (norm(y, w.get("sub_norm")) if config.sub_norm else y) @ w["output"].T

"""Attention whose keys and values are made from a latent vector."""

import math

import torch
from torch import Tensor

from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.verify.parts.base import Reading, Weights, norm, output_of, positions, sees_last, turn

SHARPNESS = 2.0


def latent_attention(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Attend over the normalised stream h, (T, D)."""
    config = reading.config_of(LatentAttentionConfig)
    site, place = reading.site, positions(h)
    heads, size, rotary = config.heads, config.head_width(site), config.rotary
    still = size - rotary
    q, latent, key = (h @ w["query_down"].T).split((heads * size, config.latent, rotary), dim=1)
    q = q.view(-1, heads, size)
    q = norm(torch.cat([q[..., :still], turn(q[..., still:], place)], dim=-1))
    up = (norm(latent, w.get("latent_norm")) @ w["up"].T).view(-1, heads, still + size)
    key = turn(key, place)[:, None].expand(-1, heads, -1)
    k, v = norm(torch.cat([up[..., :still], key], dim=-1)), up[..., still:]
    scores = torch.einsum("thd,shd->hts", q, k) * SHARPNESS / math.sqrt(size)
    sees = sees_last(len(h), site.ctx, h.device, causal=site.causal)
    scores = scores.masked_fill(~sees, -math.inf)
    y = torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v).flatten(1)
    return output_of(y, w, normalise=config.sub_norm)

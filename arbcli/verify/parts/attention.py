"""Attention to all positions, or to those of a window."""

import math

import torch
from torch import Tensor

from arbcli.config.parts.attention import AttentionConfig
from arbcli.verify.parts.base import (
    Reading,
    Weights,
    norm,
    output_of,
    positions,
    rounded,
    sees_last,
    turn,
)


def attention(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Attend over the normalised stream h, (T, D)."""
    config, site = reading.config_of(AttentionConfig), reading.site
    size, rotary = config.width(site), config.rotary
    heads, kv = config.heads, config.kv_heads or config.heads
    qkv = (rounded(h) if config.bitnet else h) @ w["qkv"].T
    if config.bias:
        qkv = qkv + w["bias"][:, 0]
    q, k, v = qkv.view(len(h), heads + 2 * kv, size).split((heads, kv, kv), dim=1)
    if config.query_key_norm != "none":
        gains = config.query_key_norm == "gain"
        q, k = (
            norm(part, w[name] if gains else None, site.norm_eps)
            for part, name in ((q, "query_gain"), (k, "key_gain"))
        )
    q, k = (turn(part, positions(h), config.rotated(site), rotary) for part in (q, k))
    k, v = (part.repeat_interleave(heads // kv, dim=1) for part in (k, v))
    sharpness = 1.0
    if rotary.scaling == "yarn":
        sharpness = (0.1 * math.log(rotary.factor) + 1) ** 2
    scores = torch.einsum("thd,shd->hts", q, k) * sharpness / math.sqrt(size)
    window = min(config.window or site.ctx, site.ctx)
    sees = sees_last(len(h), window, h.device, causal=site.causal)
    scores = scores.masked_fill(~sees, -math.inf)
    if config.sink:  # a position that has no value
        sinks = w["sinks"].view(heads, 1, 1).expand(-1, len(h), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    shares = scores.softmax(dim=-1)[..., : len(h)]
    y = torch.einsum("hts,shd->thd", shares, v).flatten(1)
    eps = site.norm_eps if config.bitnet else None
    y = output_of(y, w, normalise=config.sub_norm, rounded_eps=eps)
    return y + w["output_bias"][:, 0] if config.output_bias else y

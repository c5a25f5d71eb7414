"""Compressed attention in plain PyTorch, for Transformers."""

import math

import torch
from torch import Tensor, nn

from arbcli.interop.huggingface.modeling_core import (
    Packed,
    PartSpec,
    Reading,
    Settings,
    attention_shares,
    mixed,
    norm,
    rotate,
    sees_last,
    vector,
    wide,
)


class Indexer(nn.Module):
    """Chooses entries for the positions after each one that completes an entry."""

    def __init__(self, part: Settings, kv: int, spec: PartSpec) -> None:
        super().__init__()
        self.heads, self.width = part["index_heads"], part["index_width"]
        self.ratio, self.top_k = part["ratio"], part["top_k"]
        self.query = Packed(self.heads * (self.width + 1), spec.dim, spec)
        self.key = Packed(self.width, kv, spec)

    def forward(self, ends: Tensor, still: Tensor, sees: Tensor) -> Tensor:
        """Choose up to `top_k` of the entries that each group sees, (N, N) bool.

        Args:
            ends: (N, D), the normalised stream where entries are complete.
            still: (N, G, d), the entries before their rotation.
            sees: (N, N) bool.
        """
        starts, half = torch.arange(len(ends)) * self.ratio, self.width // 2
        q, weights = self.query(ends.detach()).split((self.heads * self.width, self.heads), dim=1)
        q = norm(q.view(len(ends), self.heads, -1))
        q = rotate(q, starts + self.ratio - 1, half)
        keys = rotate(norm(self.key(still.detach().flatten(1))), starts, half)
        products = self.limit(wide(torch.einsum("ghd,jd->ghj", q, keys)), sees)
        scores = (wide(weights)[..., None] * products).sum(dim=1)
        return self.choose(scores / math.sqrt(self.heads * self.width), sees)

    def limit(self, products: Tensor, _sees: Tensor) -> Tensor:
        """Clamp (N, heads, N) products to at least 0."""
        return products.relu()

    def choose(self, scores: Tensor, sees: Tensor) -> Tensor:
        """Choose the visible entries of the largest (N, N) scores: (N, N) bool."""
        reverse = scores.masked_fill(~sees, -math.inf).flip(1)  # of ties, the later one
        order = reverse.argsort(dim=1, descending=True, stable=True)
        best = len(scores) - 1 - order[:, : self.top_k]
        return torch.zeros_like(sees).scatter(1, best, True) & sees


class CompressedAttention(nn.Module):
    """Attention to the last positions, and to entries that pool several earlier ones."""

    name = "attention"

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.part, self.heads, self.kv_heads = part, part["heads"], part["kv_heads"]
        self.width = width = part["head_width"] or spec.dim // self.heads
        self.rotated = part["rotary"] or width // 4 * 2
        self.ratio, self.entries = part["ratio"], max(1, spec.ctx // part["ratio"])
        inner, kv = self.heads * width, self.kv_heads * width
        pools = part["pooling"] == "softmax"
        self.sizes = (inner, kv, kv, kv) if pools else (inner, kv, kv)
        self.projection = Packed(sum(self.sizes), spec.dim, spec)
        self.beta = nn.Parameter(torch.empty(kv, self.ratio)) if pools else None
        self.key_gain = vector(width) if part["key_gain"] else None
        self.sink = vector(self.heads)
        self.output = Packed(spec.dim, inner, spec)
        self.indexer = Indexer(part, kv, spec) if part["top_k"] is not None else None

    def forward(self, _x: Tensor, h: Tensor, _reading: Reading) -> Tensor:
        """Attend over the normalised stream, (T, D)."""
        length, number = len(h), len(h) // self.ratio
        position_ids, device = torch.arange(length), h.device
        q, recent, value, *gate = self.projection(h).split(self.sizes, dim=1)
        q = rotate(norm(q.view(length, self.heads, -1)), position_ids, self.rotated)
        recent = norm(recent.view(length, self.kv_heads, -1), self.key_gain)
        recent = rotate(recent, position_ids, self.rotated)

        blocks, *gate = (
            wide(part[: number * self.ratio]).unflatten(0, (number, self.ratio))
            for part in (value, *gate)
        )
        if self.beta is None:
            pooled = blocks.mean(dim=1)
        else:
            pooled = ((gate[0] + wide(self.beta).T).softmax(dim=1) * blocks).sum(dim=1)
        still = norm(pooled.view(number, self.kv_heads, self.width)).to(h.dtype)
        entries = still if self.key_gain is None else still * self.key_gain
        entries = rotate(entries, position_ids[:number] * self.ratio, self.rotated)

        # what positions see of the entries after g of them are complete
        complete = torch.arange(number + 1, device=device)[:, None]
        entry = torch.arange(number, device=device)
        sees = (entry < complete) & (entry >= complete - self.entries)
        if self.indexer and number:
            sees[1:] = self.indexer(h[self.ratio - 1 :: self.ratio], still, sees[1:])
        sees = sees[(position_ids + 1) // self.ratio]
        sees = torch.cat((sees, sees_last(length, self.part["window"], device)), dim=1)
        keys = torch.cat((entries, recent))
        y = mixed(self.shares(q, keys, sees), keys)
        y = rotate(y.view(length, self.heads, -1), -position_ids, self.rotated).flatten(1)
        return self.output(norm(y) if self.part["sub_norm"] else y)

    def shares(self, q: Tensor, keys: Tensor, sees: Tensor) -> Tensor:
        """Compute the shares of entries and positions, (H, T, N + T), of each query."""
        return attention_shares(q, keys, sees, self.width**-0.5, self.sink)

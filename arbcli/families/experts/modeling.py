"""Mixtures of experts in plain PyTorch, for Transformers."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.interop.huggingface.modeling_core import (
    MIX,
    Packed,
    PartSpec,
    Reading,
    Settings,
    gated,
    ngram_rows,
    norm,
    wide,
)

LIMIT = 10.0
"""Limit of clamped gates and inputs."""
BALANCE_UNITS = {"softmax": 1 / 8, "softplus": 1 / 32}
"""Score of one unit of balance, by the kind of gate."""
HASHED, HASH_BITS = 3, 31
"""Bytes of the n-gram that a hash chooses by, and bits of the hash."""


class Gate(nn.Module):
    """Chooses experts by the products of a query and a key of each, or by a hash of the text."""

    balance: Tensor

    def __init__(self, part: Settings, width: int, spec: PartSpec) -> None:
        super().__init__()
        self.experts, self.top_k, self.kind = part["experts"], part["top_k"], part["gate"]
        self.keys = Packed(self.experts, width, spec)
        if self.kind != "hash":
            self.register_buffer("balance", torch.empty(self.experts, dtype=torch.int8))

    def forward(self, query: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
        """Choose experts, (T, k) int64, and weigh them, (T, k) float32."""
        scores = wide(self.keys(norm(query)))
        if self.kind != "softmax":
            scores = functional.softplus(scores).sqrt()
        if self.kind == "hash":
            chosen = self._hash_experts(reading)
        else:
            chosen = self.choose(scores + self.balance * BALANCE_UNITS[self.kind])
        scores = scores.gather(1, chosen)
        if self.kind == "softmax" or self.top_k == 1:
            return chosen, scores.softmax(dim=1)
        return chosen, scores / scores.sum(dim=1, keepdim=True)

    def choose(self, chances: Tensor) -> Tensor:
        """Choose the experts of the largest chances, (T, experts): (T, k) int64."""
        return chances.topk(self.top_k).indices

    def _hash_experts(self, reading: Reading) -> Tensor:
        """Draw experts by the n-gram at each position, from those that are left."""
        rows = ngram_rows(reading.text, 2**HASH_BITS, HASHED)[reading.position_ids]
        drawn: list[Tensor] = []
        for draw in range(self.top_k):
            key = (rows + (draw << 40)) * MIX
            key = (key ^ ((key >> 32) & 0xFFFFFFFF)) * MIX
            expert = ((key >> 32) & 0x7FFFFFFF) * (self.experts - draw) >> HASH_BITS
            # the number of the expert among those that are left, in ascending order
            for earlier in torch.stack(drawn).sort(dim=0).values if drawn else ():
                expert = expert + (expert >= earlier)
            drawn.append(expert)
        return torch.stack(drawn, dim=1)


class SharedExpert(nn.Module):
    """The expert of all positions."""

    def __init__(self, part: Settings, dim: int, spec: PartSpec) -> None:
        super().__init__()
        self.gate_up = Packed(2 * part["width"], dim, spec)
        self.down = Packed(dim, part["width"], spec)

    def forward(self, h: Tensor, limit: float) -> Tensor:
        """Transform (T, dim)."""
        return self.down(norm(gated(self.gate_up(h), limit)))


class Experts(nn.Module):
    """Gated MLPs, of which each position uses a few.

    As a channel mixer they transform the normalised stream, and the stream is the gate's query.
    """

    name = "experts"

    def __init__(
        self, part: Settings, spec: PartSpec, dim: int | None = None, query: int | None = None
    ) -> None:
        super().__init__()
        dim, width, self.experts = dim or spec.dim, part["width"], part["experts"]
        self.limit = LIMIT if part["clamp"] else math.inf
        self.gate = Gate(part, query or spec.dim, spec)
        self.gate_up = Packed(self.experts * 2 * width, dim, spec)
        self.down = Packed(self.experts * dim, width, spec)
        self.shared = SharedExpert(part, dim, spec) if part["shared"] else None

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        """Send positions of h, (T, dim), to experts that queries x, (T, query), choose."""
        chosen, gates = self.gate(x, reading)
        up, down = (part.weight(h.dtype).chunk(self.experts) for part in (self.gate_up, self.down))
        y = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            hidden = norm(gated(functional.linear(h[rows], up[expert]), self.limit))
            result = functional.linear(hidden, down[expert])
            y = y.index_add(0, rows, gates[rows, slots, None].to(h.dtype) * result)
        return y + self.shared(h, self.limit) if self.shared else y

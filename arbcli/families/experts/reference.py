"""A mixture of experts: all of them transform every position, and those chosen count."""

import math

import torch
from torch import Tensor

from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.graph.sequencer_reference import MIX, ngram_row, ngrams
from arbcli.verify.parts.base import Reading, Weights, gated, norm

LIMIT = 10.0
"""Limit of clamped gates and inputs."""
HASHED = 3
"""Bytes of the n-gram that a hash chooses by."""


def experts(w: Weights, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Send positions of h, (T, D), to experts that are chosen by the stream x, or by the text."""
    config = reading.config_of(ExpertsConfig)
    number, limit = config.experts, LIMIT if config.clamp else math.inf
    gates = _gates(w, x, reading)
    up, down = (w[name].unflatten(0, (number, -1)) for name in ("gate_up", "down"))
    hidden = norm(gated(torch.einsum("td,efd->tef", h, up), limit), w.get("sub_norm"))
    y = torch.einsum("te,tef,edf->td", gates, hidden, down)
    if config.shared:
        hidden = norm(gated(h @ w["shared.gate_up"].T, limit), w.get("shared.sub_norm"))
        y = y + hidden @ w["shared.down"].T
    return y


def _gates(w: Weights, query: Tensor, reading: Reading) -> Tensor:
    """Weigh experts by (T, D) queries: (T, experts), 0 for those that are not chosen."""
    config = reading.config_of(ExpertsConfig)
    softmax = config.gate == "softmax"
    scores = norm(query, w.get("gate.norm")) @ w["gate.keys"].T
    if not softmax:
        scores = torch.log(1 + torch.exp(scores)).sqrt()
    if config.gate == "hash":
        chosen = torch.tensor(hashed_experts(reading), device=scores.device)
    else:
        chances = scores + reading.memory("gate.balance") * (1 / 8 if softmax else 1 / 32)
        taken = reading.taken("gate")
        chosen = chances.topk(config.top_k).indices
        if taken:
            chosen = taken[reading.iteration][: len(query)]
            reading.judged.judge(chances.gather(1, chosen), chances)
    gates = scores.gather(1, chosen)
    gates = gates.softmax(dim=1) if softmax else gates / gates.sum(dim=1, keepdim=True)
    return torch.zeros_like(scores).scatter(1, chosen, gates)


def hashed_experts(reading: Reading) -> list[list[int]]:
    """Draw experts by the 3-gram that ends at each position's byte, from those that are left."""
    experts = []
    for place in reading.places:
        left, chosen = list(range(reading.config_of(ExpertsConfig).experts)), []
        row = ngram_row(ngrams(reading.text, HASHED)[place], 2**31)
        for draw in range(reading.config_of(ExpertsConfig).top_k):
            key = (row + draw * 2**40) * MIX % 2**64
            key = (key ^ (key >> 32)) * MIX % 2**64
            chosen.append(left.pop((key >> 32) % 2**31 * len(left) >> 31))
        experts.append(chosen)
    return experts

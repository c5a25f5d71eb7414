"""Experts that are iterated: messages of a graph come in, and each position halts by itself.

An iteration adds to the stream what a few experts make of it, what a low-rank adapter of its own
adds, and what the graph's edges carry to the position's code, one hop further each time. Then the
stream is drawn a little towards what it was at first, so that any number of iterations stays
bounded. What edges carry may enter the choice of experts, and scale what is inside of adapters,
from the first iteration on. A position's result is the mean of its streams, weighted by its
probabilities of halting. Source: A. Graves, "Adaptive Computation Time", https://arxiv.org/abs/1603.08983.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.config.parts.memories import IteratedConfig
from arbcli.config.site import Site
from arbcli.model.flow import Reading
from arbcli.model.initial import output_std
from arbcli.model.layers.compiled import anchor
from arbcli.model.layers.kinds import layers_for
from arbcli.model.parts.codebook import Codebook, Found
from arbcli.model.parts.edges import Edges
from arbcli.model.parts.experts import Experts
from arbcli.model.parts.quantiser import Quantiser

HALT_AT = 0.99
"""A position is done when its probabilities of halting add up to this."""
HALT_BIAS = -1.0
"""Added to the score of halting: at first about a quarter halts with each iteration."""
HALT_PRIOR = 0.25
"""Expected share of a position that halts with each iteration: see `ponder_cost`."""
KEEP = 0.95
"""Share of the stream's change that an iteration keeps."""


class Iterated(NamedTuple):
    """Result of the iterations for a stream of (B, T, D)."""

    x: Tensor
    """(B, T, D)."""
    shares: Tensor
    """(iterations, B * T) float32: of each position, what halted with each iteration."""

    def ponder_cost(self) -> Tensor:
        """Measure how far halting is from a geometric distribution, a scalar in nats.

        Without it iterations that have learned nothing yet are left at once, and never learn:
        all positions were seen to halt with the first one. Source: A. Banino et al., "PonderNet",
        https://arxiv.org/abs/2107.05407.
        """
        prior = [HALT_PRIOR * (1 - HALT_PRIOR) ** index for index in range(len(self.shares))]
        prior[-1] = 1 - sum(prior[:-1])
        shares = self.shares.clamp(min=1e-6)
        logs = torch.stack(
            [share.log() - math.log(p) for share, p in zip(shares, prior, strict=True)]
        )
        return (self.shares * logs).sum(dim=0).mean()


class MoEGraph(nn.Module):
    """Iterations of the same experts.

    Args:
        config: their shape.
        site: where they stand.
        code_width: of a row of the codebook whose codes the graph joins; None without a graph.
    """

    def __init__(self, config: IteratedConfig, site: Site, code_width: int | None) -> None:
        super().__init__()
        self.config, area, layers = config, "moe_graph", layers_for(site)
        width = config.expert_dim if config.experts else 0

        def linear(out_features: int, in_features: int, std: float | None = None) -> nn.Module:
            return layers.linear(out_features, in_features, site, area=area, std=std)

        def to_stream(in_features: int) -> nn.Module:
            return linear(site.dim, in_features, output_std(in_features, site.depth))

        query = config.gate_dim if config.experts else 0
        self.parts = (width, query, config.adapter_rank, 1)
        self.norm = layers.norm(site.dim, site)
        self.inward = linear(sum(self.parts), site.dim)
        if config.experts:
            self.experts = Experts(config.experts, site, width, query, area)
            self.sub_norm = layers.norm(width, site)
            self.output = to_stream(width)
        self.adapter_norm = layers.norm(config.adapter_rank, site)
        self.adapters = nn.ModuleList(
            to_stream(config.adapter_rank) for _ in range(config.iterations)
        )
        if config.edges:
            if code_width is None:
                raise ValueError("a graph of codes needs the width of a codebook")
            self.edges = Edges(config.edges)
            self.message_norm = layers.norm(code_width, site)
            self.message = to_stream(code_width)
        self.edge_query = self.edge_scale = None
        if config.graph_gate and code_width is not None:
            self.edge_query = linear(query, code_width)
        if config.graph_adapters and code_width is not None:
            self.edge_scale = linear(config.adapter_rank, code_width)

    def forward(
        self,
        x: Tensor,
        codebook: Codebook | Quantiser | None,
        found: Found | None,
        reading: Reading | None = None,
    ) -> Iterated:
        """Iterate over the stream (B, T, D).

        Args:
            x: the stream.
            codebook: whose rows the graph's edges carry.
            found: what it found for this stream.
            reading: has the n-grams that hashes choose experts by.
        """
        batch, length, dim = x.shape
        start = stream = x.reshape(-1, dim)
        codes, mixture = None, self.config.experts
        chosen = self.experts.by_hash(reading) if mixture else None
        if self.config.edges:
            if found is None or codebook is None:
                raise ValueError("a graph of codes needs a codebook and what it found")
            codes = found.codes.flatten()
            if torch.is_grad_enabled():
                self.edges.note(found.codes)
            # a hard choice: its value is 1, and its gradient goes to the weight of the code
            sure = (1 + found.confidence - found.confidence.detach()).reshape(-1, 1)
        gone = torch.zeros(len(stream), device=x.device)  # what has halted, 0..1
        result, shares = torch.zeros_like(stream), []
        for index, adapter in enumerate(self.adapters):
            inner, query, low, halting = self.inward(stream, self.norm).split(self.parts, dim=-1)
            if codes is not None and codebook is not None:
                rows, strength, codes = self._hop(codes, sure, codebook, x.dtype)
            if self.edge_scale:
                low = low * (1 + self.edge_scale(rows, self.message_norm) * strength)
            change = adapter(low, self.adapter_norm)
            if self.edge_query:
                query = query + self.edge_query(rows, self.message_norm) * strength
            if mixture:
                mixed = self.experts.mix(inner, query, chosen) + inner
                change = change + self.output(mixed, self.sub_norm)
            if codes is not None:
                change = change + self.message(rows, self.message_norm) * strength
            stream = start + KEEP * (stream - start) + change
            halt = torch.sigmoid(halting[:, 0].float() + HALT_BIAS)
            last = (gone + halt >= HALT_AT) | (index == len(self.adapters) - 1)
            share = torch.where(last, 1 - gone, halt) * (gone < HALT_AT)
            shares.append(share)
            result = result + share[:, None].to(x.dtype) * stream
            gone = torch.where(last, 1.0, gone + halt)
        return Iterated(result.view(batch, length, dim), torch.stack(shares))

    def _hop(
        self, codes: Tensor, sure: Tensor, codebook: Codebook | Quantiser, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Find what edges carry to (M,) codes.

        Returns:
            Rows of the codebook, (M, width); how strong the edges are, (M, 1); and the codes one
            hop further on.
        """
        ids, weights = self.edges(codes, anchor(codes))
        total = weights.abs().sum(dim=1, keepdim=True)
        rows = codebook.table(ids, weights / total.clamp(min=1e-6), dtype)
        # how strong the edges are counts after the norm, which would undo it
        strength = (total.clamp(max=1) * sure).to(dtype)
        best = weights.detach().abs().argmax(dim=1, keepdim=True)
        on = ids.gather(1, best)[:, 0]  # a code without an edge stays
        return rows, strength, torch.where(on >= 0, on, codes)

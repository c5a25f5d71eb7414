"""Iterated experts with messages of a graph of codes, and adaptive halting for each position.

An iteration adds to the stream the outputs of a few experts, of a low-rank adapter that is specific
to the iteration, and the message of the graph's edges for the position's code, one hop further each
time. The stream is then pulled towards its initial value, so that it stays bounded for any number
of iterations. Messages can also contribute to the selection of experts, and scale the adapters. The
result is the mean of the streams of all iterations, weighted by the halting probabilities. Source:
A. Graves, "Adaptive Computation Time", https://arxiv.org/abs/1603.08983.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.experts.mixture import Experts
from arbcli.families.graph.codebook import Codebook, CodebookOutput
from arbcli.families.graph.config import IteratedConfig
from arbcli.families.graph.edges import Edges
from arbcli.families.graph.quantiser import Quantiser
from arbcli.model.layers.compiled import anchor
from arbcli.model.layers.kinds import layers_for
from arbcli.model.parts.base import BlockInputs

HALT_SUM = 0.99
"""Sum of halting probabilities at which a position halts."""
HALT_BIAS = -1.0
"""Bias of the halting logit, with which initially about a quarter halts in each iteration."""
HALT_PRIOR = 0.25
"""Halting probability of the geometric prior of `ponder_cost`."""
KEEP = 0.95
"""Factor of the stream's difference from its initial value in each iteration."""


class IterationOutput(NamedTuple):
    """Result of the iterations for a stream of (B, T, D)."""

    x: Tensor
    """(B, T, D)."""
    shares: Tensor
    """(iterations, B * T) float32, halting distribution of each position."""

    def ponder_cost(self) -> Tensor:
        """Compute the KL divergence of halting from a geometric distribution, a scalar in nats.

        Without this loss, all positions learn to halt in the first iteration before later ones
        have learned anything. Source: A. Banino et al., "PonderNet", https://arxiv.org/abs/2107.05407.
        """
        prior = [HALT_PRIOR * (1 - HALT_PRIOR) ** index for index in range(len(self.shares))]
        prior[-1] = 1 - sum(prior[:-1])
        shares = self.shares.clamp(min=1e-6)
        logs = torch.stack(
            [share.log() - math.log(p) for share, p in zip(shares, prior, strict=True)]
        )
        return (self.shares * logs).sum(dim=0).mean()


class MoEGraph(nn.Module):
    """Iterations with shared experts: see the module's docstring.

    Args:
        config: configuration of iterations, experts and graph.
        spec: storage settings and width of the stage.
        code_width: width of a row of the codebook whose codes are the nodes; 0 without one.
    """

    draws = (
        "norm", "inward", "experts", "sub_norm", "output", "adapter_norm", "adapters",
        "message_norm", "message", "edge_query", "edge_scale",
    )  # fmt: skip

    def __init__(self, config: IteratedConfig, spec: LayerSpec, code_width: int) -> None:
        super().__init__()
        self.config, area, layers = config, "moe_graph", layers_for(spec)
        width = config.expert_dim if config.experts else 0
        query = config.gate_dim if config.experts else 0
        self.parts = (width, query, config.adapter_rank, 1)
        self.norm = layers.norm(spec.dim, spec)
        self.inward = layers.linear(sum(self.parts), spec.dim, spec, area=area)
        if config.experts:
            expert_spec = config.experts.part_spec(spec)
            self.experts = Experts(config.experts, expert_spec, width, query, area)
            self.sub_norm = layers.norm(width, spec)
            self.output = layers.output(width, spec, area=area)
        self.adapter_norm = layers.norm(config.adapter_rank, spec)
        self.adapters = nn.ModuleList(
            layers.output(config.adapter_rank, spec, area=area) for _ in range(config.iterations)
        )
        if config.edges:
            self.edges = Edges(config.edges)
            self.message_norm = layers.norm(code_width, spec)
            self.message = layers.output(code_width, spec, area=area)
        self.edge_query = self.edge_scale = None
        if config.graph_gate:
            self.edge_query = layers.linear(query, code_width, spec, area=area)
        if config.graph_adapters:
            self.edge_scale = layers.linear(config.adapter_rank, code_width, spec, area=area)

    def forward(
        self,
        x: Tensor,
        codebook: Codebook | Quantiser | None,
        lookup: CodebookOutput | None,
        inputs: BlockInputs | None = None,
    ) -> IterationOutput:
        """Iterate over the stream (B, T, D).

        Args:
            x: the stream.
            codebook: codebook whose rows are the messages of the graph's edges.
            lookup: result of the codebook for this stream.
            inputs: additional inputs, with the n-grams for hash routing.
        """
        batch, length, dim = x.shape
        start = stream = x.reshape(-1, dim)
        codes, mixture = None, self.config.experts
        chosen = self.experts.choose_by_hash(inputs) if mixture else None
        if self.config.edges:
            if lookup is None or codebook is None:
                raise ValueError("a graph of codes needs a codebook and its result")
            codes = lookup.codes.flatten()
            if torch.is_grad_enabled():
                self.edges.record_codes(lookup.codes)
            # straight-through: the value is 1, and the gradient goes to the weight of the code
            confidence = (1 + lookup.confidence - lookup.confidence.detach()).reshape(-1, 1)
        halted = torch.zeros(len(stream), device=x.device)  # halted probability, 0..1
        result, shares = torch.zeros_like(stream), []
        for index, adapter in enumerate(self.adapters):
            inner, query, low, halting = self.inward(stream, self.norm).split(self.parts, dim=-1)
            if codes is not None and codebook is not None:
                rows, strength, codes = self._hop(codes, confidence, codebook, x.dtype)
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
            p = torch.sigmoid(halting[:, 0].float() + HALT_BIAS)
            last = (halted + p >= HALT_SUM) | (index == len(self.adapters) - 1)
            share = torch.where(last, 1 - halted, p) * (halted < HALT_SUM)
            shares.append(share)
            result = result + share[:, None].to(x.dtype) * stream
            halted = torch.where(last, 1.0, halted + p)
        return IterationOutput(result.view(batch, length, dim), torch.stack(shares))

    def _hop(
        self, codes: Tensor, confidence: Tensor, codebook: Codebook | Quantiser, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the messages of the edges of codes, (M,).

        Returns:
            Messages, (M, width); their strengths, (M, 1); and the codes one hop further, (M,).
        """
        ids, weights = self.edges(codes, anchor(codes))
        total = weights.abs().sum(dim=1, keepdim=True)
        rows = codebook.table(ids, weights / total.clamp(min=1e-6), dtype)
        # the strength is applied after the norm, which would cancel it
        strength = (total.clamp(max=1) * confidence).to(dtype)
        best = weights.detach().abs().argmax(dim=1, keepdim=True)
        target = ids.gather(1, best)[:, 0]
        return rows, strength, torch.where(target >= 0, target, codes)

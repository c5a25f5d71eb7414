"""A graph of codes that recently followed one another, stored as bounded integers.

Codes are hashed to buckets of a few edges by their remainder. An edge has a source and a target
code, a score that counts how often the target followed the source, and a sign, the sum of votes for
and against it: one vote a step, by the gradient of the loss. An edge's message is the row of its
target code, times sign and score. Edges are not differentiable.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.model.packed_model import StepMemory

INT8_MAX = 127
NEW_SCORE, NEW_SIGN = 16, 64


class Edges(StepMemory):
    """The edges, as integer buffers of shape (buckets, edges per bucket).

    Buffers:
        source, target: int32 codes.
        sign: int8, -127..127, sum of votes.
        score: int8, 0..127; 0 marks an empty slot.
    """

    source: Tensor
    target: Tensor
    sign: Tensor
    score: Tensor

    def __init__(self, edges: tuple[int, int]) -> None:
        super().__init__(area="moe_graph")
        for name, dtype in (
            ("source", torch.int32), ("target", torch.int32),
            ("sign", torch.int8), ("score", torch.int8),
        ):  # fmt: skip
            self.declare(name, torch.zeros(edges, dtype=dtype), "edges")

    def forward(self, codes: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the outgoing edges of codes.

        Args:
            codes: (M,) int64.
            anchor: empty tensor; if it requires a gradient, the backward votes on the edges.

        Returns:
            Target codes, (M, W) int64 with -1 for no edge, and weights in -1..1, (M, W) float32,
            whose gradients are turned into votes.
        """
        return _LookUpEdges.apply(codes, anchor, self)

    @torch.no_grad()
    def look_up(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Look up edges like `forward`, without votes: (M, W) int64 and float32 for (M,) codes."""
        bucket = codes % len(self.source)
        score = self.score[bucket]
        is_edge = (self.source[bucket] == codes[:, None]) & (score > 0)
        weights = self.sign[bucket].float() * score.float() / INT8_MAX**2
        return torch.where(is_edge, self.target[bucket].long(), -1), weights * is_edge

    def vote(self, codes: Tensor, targets: Tensor, grad: Tensor) -> None:
        """Count the signs of the weights' gradients, (M, W); negative ones vote for an edge."""
        size, ways = self.source.shape
        slots = (codes % size)[:, None] * ways + torch.arange(ways, device=codes.device)
        votes = -torch.sign(grad).to(torch.int32) * (targets >= 0)
        total = torch.zeros(size * ways, dtype=torch.int32, device=codes.device)
        self.add("votes", total.index_add_(0, slots.flatten(), votes.flatten()))

    def record_codes(self, codes: Tensor) -> None:
        """Record the codes of a batch, (B, T), until the step ends."""
        if codes.shape[1] > 1:
            self.record("pairs", torch.stack((codes[:, :-1], codes[:, 1:])).flatten(1))

    @torch.no_grad()
    def finish_step(self) -> None:
        """Update signs by the votes, increment scores of the edges in use, and add new edges.

        Among a bucket's pairs without an edge, the last one decrements the score of the weakest
        edge, and replaces it once that is zero.
        """
        if "votes" in self.sums:
            sign = self.sign + torch.sign(self.sums["votes"]).view_as(self.sign)
            self.sign.copy_(sign.clamp_(-INT8_MAX, INT8_MAX))
        if "pairs" in self.records:
            self._count_pairs(torch.cat(self.records["pairs"], dim=1))
        self.forget()

    def _count_pairs(self, pairs: Tensor) -> None:
        source, target = pairs  # (P,) int64 each
        size, ways = self.source.shape
        bucket = source % size
        score = self.score[bucket]  # (P, W) int8, before the step
        is_edge = (self.source[bucket] == source[:, None]) & (score > 0)
        is_edge &= self.target[bucket] == target[:, None]
        slots = bucket[:, None] * ways + torch.arange(ways, device=bucket.device)
        hits = torch.zeros(size * ways, dtype=torch.int32, device=bucket.device)
        hits = hits.index_add_(0, slots.flatten(), is_edge.flatten().int()).view(size, ways) > 0
        # last pair without an edge in each bucket; an integer maximum, which is deterministic
        index = torch.arange(len(source), device=bucket.device)
        index = torch.where(is_edge.any(dim=1), -1, index)
        last = torch.full((size,), -1, device=bucket.device)
        last = last.scatter_reduce_(0, bucket, index, "amax")
        weakest = self.score.min(dim=1, keepdim=True).indices
        weakened = torch.zeros_like(hits).scatter_(1, weakest, True)
        weakened &= (last >= 0)[:, None] & ~hits
        score = self.score.int()
        new = weakened & (score <= 1)
        score = torch.where(hits, (score + 1).clamp(max=INT8_MAX), score - weakened.int())
        self.score.copy_(torch.where(new, NEW_SCORE, score))
        self.sign.masked_fill_(new, NEW_SIGN)
        last = last.clamp(min=0)
        self.source.copy_(torch.where(new, source[last].int()[:, None], self.source))
        self.target.copy_(torch.where(new, target[last].int()[:, None], self.target))

    def gauges(self) -> dict[str, float]:
        """Return the share of slots in use; synchronises with the device."""
        return {"edges": float((self.score > 0).float().mean())}


class _LookUpEdges(Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, _anchor: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
        ctx.edges = edges
        targets, weights = edges.look_up(codes)
        ctx.save_for_backward(codes, targets)
        ctx.mark_non_differentiable(targets)
        return targets, weights

    @staticmethod
    def backward(ctx: Any, _grad_targets: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.edges.vote(*ctx.saved_tensors, grad)
        return None, None, None

"""A graph of codes that were lately active one after the other, as bounded integers.

A code has one bucket of a few edges, shared with the other codes of the same remainder. An edge
has the code it comes from, the code that followed, a score of how often that was so, and a sign: a
sum of votes for and against it, one a step, by the gradient of the loss. What an edge carries is
the row of the code it leads to, times sign and score. Nothing here is differentiated.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.model.step_memory import StepMemory

MOST = 127
NEW_SCORE, NEW_SIGN = 16, 64


class Edges(StepMemory):
    """The edges, as integer buffers of (buckets, edges of a bucket).

    source, target: int32 codes.
    sign: int8, -127..127, how much the votes are for it.
    score: int8, 0..127; an edge of score 0 is none.
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
        self.forget()

    def forget(self) -> None:
        """Forget the forwards of a step that never ended."""
        self._pairs: list[Tensor] = []
        self._votes: Tensor | None = None

    def forward(self, codes: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Find the edges that leave some codes.

        Args:
            codes: (M,) int64.
            anchor: an empty tensor that requires a gradient where the edges are to be voted on.

        Returns:
            (M, W) int64 codes they lead to, -1 where there is no edge, and their (M, W) float32
            weights, in -1..1. What gradient these get becomes votes.
        """
        return _Leaving.apply(codes, anchor, self)

    @torch.no_grad()
    def find(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `forward` does, without votes."""
        bucket = codes % len(self.source)
        score = self.score[bucket]
        there = (self.source[bucket] == codes[:, None]) & (score > 0)
        weights = self.sign[bucket].float() * score.float() / MOST**2
        return torch.where(there, self.target[bucket].long(), -1), weights * there

    def vote(self, codes: Tensor, targets: Tensor, grad: Tensor) -> None:
        """Count the signs of (M, W) gradients of the edges' weights: below zero is for them."""
        size, ways = self.source.shape
        slots = (codes % size)[:, None] * ways + torch.arange(ways, device=codes.device)
        votes = -torch.sign(grad).to(torch.int32) * (targets >= 0)
        if self._votes is None:
            self._votes = torch.zeros(size * ways, dtype=torch.int32, device=codes.device)
        self._votes.index_add_(0, slots.flatten(), votes.flatten())

    def note(self, codes: Tensor) -> None:
        """Remember the codes of a batch, (B, T), until the step ends."""
        if codes.shape[1] > 1:
            self._pairs.append(torch.stack((codes[:, :-1], codes[:, 1:])).flatten(1))

    def join(self, group: Any) -> None:
        """Take what all processes have seen, in the order of the micro-batches, and all votes."""
        self._pairs = group.in_order(self._pairs)
        self._votes = None if self._votes is None else group.sum(self._votes)

    @torch.no_grad()
    def after_step(self) -> None:
        """Move signs by the votes; strengthen the edges that were passed, and make new ones.

        Of all pairs that fall in a bucket without an edge the last one takes the place of the
        weakest edge, once that has been weakened to nothing: a score is what an edge has left.
        """
        if self._votes is not None:
            moved = self.sign + torch.sign(self._votes).view_as(self.sign)
            self.sign.copy_(moved.clamp_(-MOST, MOST))
        if self._pairs:
            self._pass(torch.cat(self._pairs, dim=1))
        self.forget()

    def _pass(self, pairs: Tensor) -> None:
        source, target = pairs  # (P,) int64 each
        size, ways = self.source.shape
        bucket = source % size
        score = self.score[bucket]  # (P, W) int8, as before the step
        same = (self.source[bucket] == source[:, None]) & (score > 0)
        same &= self.target[bucket] == target[:, None]
        slots = bucket[:, None] * ways + torch.arange(ways, device=bucket.device)
        passed = torch.zeros(size * ways, dtype=torch.int32, device=bucket.device)
        passed = passed.index_add_(0, slots.flatten(), same.flatten().int()).view(size, ways) > 0
        # the last pair without an edge in each bucket, by integers, so that order does not matter
        index = torch.arange(len(source), device=bucket.device)
        index = torch.where(same.any(dim=1), -1, index)
        last = torch.full((size,), -1, device=bucket.device)
        last = last.scatter_reduce_(0, bucket, index, "amax")
        weakest = self.score.min(dim=1, keepdim=True).indices
        weakened = torch.zeros_like(passed).scatter_(1, weakest, True)
        weakened &= (last >= 0)[:, None] & ~passed
        score = self.score.int()
        new = weakened & (score <= 1)
        moved = torch.where(passed, (score + 1).clamp(max=MOST), score - weakened.int())
        self.score.copy_(torch.where(new, NEW_SCORE, moved))
        self.sign.masked_fill_(new, NEW_SIGN)
        last = last.clamp(min=0)
        self.source.copy_(torch.where(new, source[last].int()[:, None], self.source))
        self.target.copy_(torch.where(new, target[last].int()[:, None], self.target))

    def gauges(self) -> dict[str, float]:
        """Measure the share of the graph's places that are taken; waits for the device."""
        return {"edges": float((self.score > 0).float().mean())}


class _Leaving(Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, _anchor: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
        ctx.edges = edges
        targets, weights = edges.find(codes)
        ctx.save_for_backward(codes, targets)
        ctx.mark_non_differentiable(targets)
        return targets, weights

    @staticmethod
    def backward(ctx: Any, _grad_targets: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.edges.vote(*ctx.saved_tensors, grad)
        return None, None, None

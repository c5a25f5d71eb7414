"""The graph of codes against lists of Python integers."""

from itertools import pairwise

import pytest
import torch

from arbcli.families.graph.edges import Edges

BUCKETS, WAYS = 4, 2
CODES = 12
"""Three codes share a bucket of two edges."""


def edges() -> Edges:
    return Edges((BUCKETS, WAYS))


def draw(shape, high, seed) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Slow:
    """The same, an edge at a time: [source, target, sign, score]."""

    def __init__(self) -> None:
        self.buckets = [[[0, 0, 0, 0] for _ in range(WAYS)] for _ in range(BUCKETS)]
        self.votes = [[0] * WAYS for _ in range(BUCKETS)]
        self.pairs = []

    def find(self, code):
        targets = []
        for source, target, sign, score in self.buckets[code % BUCKETS]:
            there = source == code and score > 0
            targets.append((target, sign * score / 127**2) if there else (-1, 0.0))
        return targets

    def vote(self, code, grads):
        for way, grad in enumerate(grads):
            if self.find(code)[way][0] >= 0:
                self.votes[code % BUCKETS][way] -= (grad > 0) - (grad < 0)

    def record_codes(self, codes):
        for row in codes:
            self.pairs += pairwise(row)

    def finish_step(self):
        for index, bucket in enumerate(self.buckets):
            for edge, votes in zip(bucket, self.votes[index], strict=True):
                edge[2] = max(-127, min(127, edge[2] + (votes > 0) - (votes < 0)))
            pairs = [pair for pair in self.pairs if pair[0] % BUCKETS == index]
            known = [tuple(edge[:2]) if edge[3] else None for edge in bucket]
            unknown = [pair for pair in pairs if pair not in known]
            scores = [edge[3] for edge in bucket]
            weakest = scores.index(min(scores))
            for way, edge in enumerate(bucket):
                if known[way] in pairs:
                    edge[3] = min(127, edge[3] + 1)
                elif way == weakest and unknown:
                    edge[3] -= 1
                    if edge[3] <= 0:
                        edge[:] = [*unknown[-1], 64, 16]
        self.votes = [[0] * WAYS for _ in range(BUCKETS)]
        self.pairs = []

    def state(self):
        return {
            name: [[edge[i] for edge in bucket] for bucket in self.buckets]
            for i, name in enumerate(("source", "target", "sign", "score"))
        }


def state(graph: Edges) -> dict[str, list]:
    return {name: buffer.tolist() for name, buffer in graph.named_buffers()}


def step(graph: Edges, slow: Slow | None, seed: int) -> None:
    """Look some codes up, vote, and note two batches."""
    codes, grad = draw((9,), CODES, seed), draw((9, WAYS), 3, seed) - 1.0
    anchor = torch.empty(0, requires_grad=True)
    targets, weights = graph(codes, anchor)
    weights.backward(grad)
    batches = [draw((2, 5), CODES // 2, seed + i) for i in (1, 2)]
    for batch in batches:
        graph.record_codes(batch)
    if slow:
        for row, code in enumerate(codes.tolist()):
            edges_of_code = slow.find(code)
            assert targets[row].tolist() == [target for target, _ in edges_of_code]
            assert weights[row].tolist() == pytest.approx([weight for _, weight in edges_of_code])
            slow.vote(code, grad[row].tolist())
        for batch in batches:
            slow.record_codes(batch.tolist())
        slow.finish_step()
    graph.finish_step()


def test_steps_equal_a_slow_model():
    graph, slow = edges(), Slow()
    for index in range(100):
        step(graph, slow, 3 * index)
        assert state(graph) == slow.state(), index
    assert (graph.score > 0).all()
    assert graph.sign.unique().numel() > 2

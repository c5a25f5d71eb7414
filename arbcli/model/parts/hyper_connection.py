"""Hyper-connections: several residual streams, which every branch of a block reads and writes.

The n streams X of a position, (n, D), begin as n copies of the embedding, and what they end as is
averaged before the head. A branch F, attention or MLP with its norm, turns them into

    B X + c F(a X)

with a, c and B made anew for each position, branch and block: n (n + 2) numbers are a packed
projection of all streams, normalised together, and a packed vector of biases. From them come a,
each in 0..1, how much of a stream is read; c, each in 0..2, how much of the branch it is given;
and B, doubly stochastic, so that mixing neither loses nor grows what streams have together
(`arbcli.kernels.streams.stream_weights`). At first the projection is zero, each branch mostly reads
one stream, in turns, c is 1 and B near the identity: the model computes what it would with one
stream. With one stream, a = B = c = 1, this is the plain block, bit by bit. Nothing but the streams
of one position goes in, so a cache keeps nothing more than keys and values.

Source: D. Zhu et al., "Hyper-Connections", https://arxiv.org/abs/2409.19606; Z. Xie et al., "mHC:
Manifold-Constrained Hyper-Connections", https://arxiv.org/abs/2512.24880.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.site import Site
from arbcli.kernels.matmul.prepacked_rows import MOST_TEXTS
from arbcli.model.layers.kinds import layers_for

BIAS = 2.0
"""Size of all biases at first: a stream is read by 0.88 or 0.12, and B has 0.95 where n is 4."""


def first_biases(streams: int, read: int) -> list[float]:
    """List the biases of a, c and B at first.

    Args:
        streams: n.
        read: which stream is read most.
    """
    of_a = [BIAS if stream == read else -BIAS for stream in range(streams)]
    of_b = [BIAS if i == j else -BIAS for i in range(streams) for j in range(streams)]
    return [*of_a, *[BIAS] * streams, *of_b]


class HyperConnection(nn.Module):
    """Mixing around a branch, where there are several streams.

    Args:
        site: where it stands.
        streams: n.
        read: number of the stream that is read most at first.
    """

    def __init__(self, site: Site, streams: int, read: int) -> None:
        super().__init__()
        self.parts = layers_for(site)
        width = streams * site.dim
        self.norm = self.parts.norm(width, site)
        self.projection = self.parts.linear(
            streams * (streams + 2), width, site, area="streams", spread=0.0, in_eight_bits=False
        )
        self.bias = self.parts.vector(first_biases(streams, read), site, area="streams")

    def forward(
        self, x: Tensor, branch: Callable[[Tensor], Tensor], *, fused: bool = False
    ) -> Tensor:
        """Turn streams (B, T, n, D) into others.

        Args:
            x: the streams.
            branch: from (B, T, D), not normalised yet, to what it adds.
            fused: whether these are positions of a step, each with bits that depend on no other.
        """
        batch, length, streams, dim = x.shape
        rows = x.reshape(-1, streams, dim)
        weigh = self.step_weights if fused else self.weights
        read, keep, write = weigh(rows)
        found = branch(self.parts.mix_streams(rows, read[:, None]).view(batch, length, dim))
        return self.parts.mix_streams(rows, keep, found.reshape(-1, dim), write).view(x.shape)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make a, B and c, (M, n), (M, n, n) and (M, n) float32, of streams (M, n, D)."""
        raw = self.projection(x.flatten(1), self.norm)
        return self.parts.stream_weights(raw, self.bias())

    def step_weights(self, x: Tensor) -> tuple[Tensor, ...]:
        """Make the same of positions of a step, by a fused product."""
        raw, number = self.projection.fused(x.flatten(1), normalise=True), len(x)
        if number > 1:  # a program has as many positions, however many texts there are
            raw = functional.pad(raw, (0, 0, 0, max(0, MOST_TEXTS - number)))
        weights = self.parts.stream_weights(raw, self.bias.prepared())
        return tuple(part[:number] for part in weights)

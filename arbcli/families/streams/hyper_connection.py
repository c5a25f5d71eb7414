"""Hyper-connections: several residual streams, which each branch of a block reads and writes.

The n streams X of a position, (n, D), begin as n copies of the embedding, and are averaged before
the head. A branch F, attention or MLP with its norm, maps them to

    B X + c F(a X)

with a, c and B computed for each position, branch and block: a packed projection of the jointly
normalised streams plus a packed bias gives n (n + 2) numbers, from which follow a in 0..1, the
weight of each stream in the input; c in 0..2, the weight of the output in each stream; and B,
doubly stochastic, so that mixing preserves the sum of the streams
(`arbcli.families.streams.kernels.stream_weights`). Initially the projection is zero, branches
mostly read one stream each, in turn, c is 1 and B is near the identity, so that the model
approximates one with a single stream. With one stream, a = B = c = 1, the result is bitwise that of
a plain block. As only the streams of one position are mixed, the decoding state does not grow.

Source: D. Zhu et al., "Hyper-Connections", https://arxiv.org/abs/2409.19606; Z. Xie et al., "mHC:
Manifold-Constrained Hyper-Connections", https://arxiv.org/abs/2512.24880.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.streams.layers import average_streams as average_streams
from arbcli.families.streams.layers import functions_for
from arbcli.families.streams.layers import spread_streams as spread_streams
from arbcli.kernels.matmul.prepacked_rows import MAX_TEXTS
from arbcli.model.layers.kinds import layers_for

BIAS = 2.0
"""Initial magnitude of the biases: streams are read by 0.88 or 0.12; B has 0.95 if n is 4."""


def first_biases(streams: int, read: int) -> list[float]:
    """Return the initial biases of a, c and B.

    Args:
        streams: n.
        read: index of the stream with the largest weight in the input.
    """
    a_bias = [BIAS if stream == read else -BIAS for stream in range(streams)]
    b_bias = [BIAS if i == j else -BIAS for i in range(streams) for j in range(streams)]
    return [*a_bias, *[BIAS] * streams, *b_bias]


class HyperConnection(nn.Module):
    """Mixing of residual streams around a branch.

    Args:
        spec: storage settings and width of the stage.
        streams: n.
        read: index of the stream that the branch initially reads most.
    """

    draws = ("norm", "projection", "bias")

    def __init__(self, spec: LayerSpec, streams: int, read: int) -> None:
        super().__init__()
        layers, width = layers_for(spec), streams * spec.dim
        self.stream_weights, self.mix_streams = functions_for(spec)
        self.norm = layers.norm(width, spec)
        self.projection = layers.linear(
            streams * (streams + 2), width, spec, area="streams", spread=0.0, low_precision=False
        )
        self.bias = layers.vector(first_biases(streams, read), spec, area="streams")

    def forward(
        self, x: Tensor, branch: Callable[[Tensor], Tensor], *, fused: bool = False
    ) -> Tensor:
        """Compute B X + c F(a X) for streams (B, T, n, D).

        Args:
            x: the streams.
            branch: F, from the unnormalised input (B, T, D) to the output.
            fused: whether to use the kernels of decoding steps, in which the bits of a position do
                not depend on others.
        """
        batch, length, streams, dim = x.shape
        rows = x.reshape(-1, streams, dim)
        weigh = self.step_weights if fused else self.weights
        read, keep, write = weigh(rows)
        mixed = self.mix_streams(rows, read[:, None], None, None)
        output = branch(mixed.view(batch, length, dim))
        return self.mix_streams(rows, keep, output.reshape(-1, dim), write).view(x.shape)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a, B and c, (M, n), (M, n, n) and (M, n) float32, from streams (M, n, D)."""
        return self.stream_weights(self.projection(x.flatten(1), self.norm), self.bias())

    def step_weights(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute `weights` of a decoding step, from streams (M, n, D), with a fused product."""
        raw, number = self.projection.fused(x.flatten(1), normalise=True), len(x)
        if number > 1:  # pads to a fixed number of positions, so that bits do not depend on it
            raw = functional.pad(raw, (0, 0, 0, max(0, MAX_TEXTS - number)))
        weights = self.stream_weights(raw, self.bias.prepared())
        return tuple(part[:number] for part in weights)

"""Initial standard deviations of weights.

| weight | standard deviation |
|---|---|
| embedding | 1 |
| projections of K inputs, and tables of width K | min(0.1, 1 / sqrt(K)) |
| output projections into the residual stream | min(0.1, 1 / sqrt(K)) / sqrt(2 * layers) |
| head | 1 / sqrt(K) |
| norms | 0: all are 1 |
"""

import math


def projection_std(in_features: int) -> float:
    """Return the standard deviation of a projection of K inputs."""
    return min(0.1, 1 / math.sqrt(in_features))


def output_std(in_features: int, layers: int) -> float:
    """Return the standard deviation of an output projection, of which each block has two.

    A stage without blocks, such as that of a head with an MLP, counts as one block.
    """
    return projection_std(in_features) / math.sqrt(2 * max(1, layers))


def head_std(in_features: int) -> float:
    """Return the standard deviation of the head."""
    return 1 / math.sqrt(in_features)

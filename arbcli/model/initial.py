"""How far weights spread at the start.

| weight | standard deviation |
|---|---|
| embedding | 1 |
| projections of K inputs, and tables of width K | min(0.1, 1 / sqrt(K)) |
| output projections, all that add to the stream | the same / sqrt(2 * layers) |
| head | 1 / sqrt(K) |
| norms | exactly 1 each |
"""

import math


def projection_std(in_features: int) -> float:
    """Choose the standard deviation of a matrix of K inputs."""
    return min(0.1, 1 / math.sqrt(in_features))


def output_std(in_features: int, layers: int) -> float:
    """Choose that of a matrix whose product is added to the stream, one of two in each block.

    Of a stage without blocks, as for a head with an MLP, it is that of one block.
    """
    return projection_std(in_features) / math.sqrt(2 * max(1, layers))


def head_std(in_features: int) -> float:
    """Choose that of the matrix that gives logits."""
    return 1 / math.sqrt(in_features)

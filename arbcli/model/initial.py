"""Initial standard deviations of weights, and learning-rate factors by width.

| weight | standard deviation |
|---|---|
| embedding | 1 |
| projections of K inputs, and tables of width K | min(0.1, 1 / sqrt(K)) |
| output projections into the residual stream | min(0.1, 1 / sqrt(K)) / sqrt(2 * layers) |
| head | 1 / sqrt(K) |
| norms | 0: all are 1 |

With the factors (muP) one learning rate transfers between sizes. Steps are relative to the initial
standard deviation of a weight. The relative change of each product should not depend on the width
(Yang et al., https://arxiv.org/abs/2203.03466; in terms of spectral norms,
https://arxiv.org/abs/2310.17813):

| weight | direction | factor |
|---|---|---|
| inner matrix | orthogonal: equal singular values | 1 |
| inner matrix | factored, sign: equal elements, whose effects add up | sqrt(384 / width) |
| head, which has 256 outputs at any width | any | sqrt(384 / width) / 4 |
| embedding, tables, gains and vectors | any | 1 |

384 is the width of the preset `small`, for which the default learning rates and the factor 1/4 of
the head were tuned.
"""

import math

from arbcli.config.layer_spec import LayerSpec

REFERENCE_WIDTH = 384
HEAD = 0.25


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


def inner_lr_factor(spec: LayerSpec, direction: str | None) -> float:
    """Return the learning-rate factor of a matrix inside the model.

    Args:
        spec: spec of the stage, which has its width.
        direction: direction of the steps; None for a rule without one.
    """
    return _width_factor(spec) if direction in ("factored", "sign") else 1.0


def head_lr_factor(spec: LayerSpec) -> float:
    """Return the learning-rate factor of the head."""
    return HEAD * _width_factor(spec)


def _width_factor(spec: LayerSpec) -> float:
    return math.sqrt(REFERENCE_WIDTH / spec.dim)

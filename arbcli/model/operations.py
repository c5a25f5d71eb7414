"""How many operations a model takes: the multiplications and additions of its products.

They are what its configuration needs, whatever a machine does besides: decoding of weights, norms,
rows that are looked up, and what is computed again in a backward are not counted. Attention counts
as if every position saw all of its window, the later ones too, as is the custom. Source:
A. Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311, appendix B.
"""

from arbcli.config.model import ModelConfig

OF_A_PRODUCT = 2
"""A multiplication and an addition."""
OF_A_STEP = 3
"""Forwards that a step is worth: its backward has two products for each one of a forward."""


def step_operations(config: ModelConfig) -> int:
    """Count the operations of forward and backward, for a window of `ctx` bytes."""
    return OF_A_STEP * forward_operations(config)


def forward_operations(config: ModelConfig) -> int:
    """Count the operations of a forward over a window of `ctx` bytes."""
    return OF_A_PRODUCT * round(config.products())

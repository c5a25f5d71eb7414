"""Floating-point operations of a model's matrix products, for model FLOPs utilisation (MFU).

Decoding of weights, norms, table look-ups and recomputation are not counted. Attention is counted
without the causal mask, as is customary. Source: A. Chowdhery et al., "PaLM",
https://arxiv.org/abs/2204.02311, appendix B.
"""

from arbcli.config.model import ModelConfig

OPERATIONS_PER_PRODUCT = 2
"""Operations of a multiply-add."""
PASSES_PER_STEP = 3
"""Cost of a step in forward passes; the backward has two products for each of the forward."""


def step_operations(config: ModelConfig) -> int:
    """Return the operations of forward and backward for a window of `ctx` bytes."""
    return PASSES_PER_STEP * forward_operations(config)


def forward_operations(config: ModelConfig) -> int:
    """Return the operations of a forward pass over a window of `ctx` bytes."""
    return OPERATIONS_PER_PRODUCT * round(config.products())

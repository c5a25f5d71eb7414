"""Floating-point operations of a model's matrix products, for model FLOPs utilisation (MFU).

Decoding of weights, norms, table look-ups and recomputation are not counted. Attention is counted
without the causal mask, as is customary. Source: A. Chowdhery et al., "PaLM",
https://arxiv.org/abs/2204.02311, appendix B.
"""

from arbcli.config.model import ModelConfig, StageConfig

OPERATIONS_PER_PRODUCT = 2
"""Operations of a multiply-add."""
PASSES_PER_STEP = 3
"""Cost of a step in forward passes; the backward has two products for each of the forward."""


def step_operations(config: ModelConfig) -> int:
    """Return the operations of forward and backward for a window of `ctx` bytes."""
    return PASSES_PER_STEP * forward_operations(config)


def forward_operations(config: ModelConfig) -> int:
    """Return the operations of a forward pass over a window of `ctx` bytes.

    Inner stages are counted at the target length of chunks.
    """
    products = sum(_stage_products(config, n, length) for n, length in enumerate(config.lengths))
    spec = config.layer_spec()
    ends = [part.products(spec, config.ctx) for part in (*config.beside, *config.head_parts)]
    plain = 0 if config.composite else config.vocabulary * spec.dim
    return OPERATIONS_PER_PRODUCT * round(products + config.ctx * (sum(ends) + plain))


def _stage_products(config: ModelConfig, index: int, positions: float) -> float:
    stage, products = config.stages[index], 0.0
    for blocks in stage.lists:
        spec = config.layer_spec(index, len(blocks))
        parts = [part for block in blocks for part in block.parts]
        products += sum(part.products(spec, positions) for part in parts)
        if stage.streams > 1:
            products += len(parts) * _stream_products(stage)
    spec, taps = config.layer_spec(index), 1
    if stage.memories:
        products += stage.memories.products(spec, positions)
        taps += stage.memories.outputs
    if stage.router:
        products += stage.dim * (taps + 1)
    products *= positions
    if stage.chunking:
        products += stage.chunking.products_with(spec, config.stages[index + 1].dim, positions)
    return products


def _stream_products(stage: StageConfig) -> int:
    """Return the multiplications of one hyper-connection: projection, reading and writing."""
    n = stage.streams
    return stage.dim * (n**2 * (n + 2) + n + n * (n + 1))

"""How many operations a model takes: the multiplications and additions of its products.

They are what its configuration needs, whatever a machine does besides: decoding of weights, norms,
rows that are looked up, and what is computed again in a backward are not counted. Attention counts
as if every position saw all of its window, the later ones too, as is the custom. Source:
A. Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311, appendix B.
"""

import itertools

from arbcli.config.compressed import CompressedConfig
from arbcli.config.dense import VOCABULARY, ModelConfig
from arbcli.config.graph import GraphConfig
from arbcli.config.hnet import HNetConfig
from arbcli.model.blocks.mamba import EXPAND

OF_A_PRODUCT = 2
"""A multiplication and an addition."""
OF_A_STEP = 3
"""Forwards that a step is worth: its backward has two products for each one of a forward."""


def step_operations(config: ModelConfig) -> int:
    """Count the operations of forward and backward, for a window of `ctx` bytes."""
    return OF_A_STEP * forward_operations(config)


def forward_operations(config: ModelConfig) -> int:
    """Count the operations of a forward over a window of `ctx` bytes.

    The chunks of an `HNet` are those of `chunk_length` positions that its routers are held to, and
    not the slots that there are for them.
    """
    if isinstance(config, GraphConfig):
        products = config.ctx * _graph_position(config)
    elif isinstance(config, HNetConfig):
        products = _hnet(config)
    elif isinstance(config, CompressedConfig):
        blocks = sum(_compressed_block(config, index) for index in range(config.layers))
        products = config.ctx * (blocks + VOCABULARY * config.dim)
    else:
        blocks = config.layers * _block(config, config.ctx)
        products = config.ctx * (blocks + VOCABULARY * config.dim)
    return OF_A_PRODUCT * round(products)


def _block(config: ModelConfig, seen: float) -> float:
    """Count the products of a dense block, of one position that sees so many."""
    projections = 4 * config.dim**2 + 3 * config.dim * config.ffn
    return projections + 2 * config.dim * seen + _streams(config)


def _streams(config: ModelConfig) -> int:
    """Count those of the hyper-connections of a block: projections, reading, and writing."""
    streams = config.streams
    if streams == 1:
        return 0
    return 2 * config.dim * (streams**2 * (streams + 2) + streams + streams * (streams + 1))


def _compressed_block(config: CompressedConfig, index: int) -> float:
    """Count the products of a block with compressed attention, of one position."""
    inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    ratio, entries = config.ratio(index), config.entries(config.ratio(index))
    found = config.dim * (2 * inner + 3 * kv) + 3 * config.dim * config.ffn
    if ratio <= config.indexed_ratio:
        width = config.index_heads * config.index_width
        of_entry = config.dim * (width + config.index_heads) + kv * config.index_width
        found += (of_entry + width * entries) / ratio
        entries = min(entries, config.top_k)
    return found + 2 * inner * (min(config.window, config.ctx) + entries)


def _graph_position(config: GraphConfig) -> int:
    """Count the products of a `GraphLM`, of one position."""
    dim, streams = config.dim, 2 + len(config.codebooks)
    found = config.layers * (3 * dim * config.ffn)
    if config.attention:
        down = dim * (dim + config.latent + config.rotary)
        up = config.latent * (2 * dim - config.heads * config.rotary)
        found += config.layers * (down + up + dim * dim + 2 * dim * config.ctx)
    if config.sequencer:
        found += dim * config.ngram_dim
    if config.memgram:
        found += dim * dim
    for halves, width, heads in config.codebooks.values():
        found += heads * config.key_dim * (2 * dim + sum(halves)) + heads * width * dim
    if config.moe or config.graph:
        found += config.max_moe_iters * _iteration(config)
    if config.router:
        found += dim * streams
    return found + 3 * dim * config.head_ffn + VOCABULARY * dim


def _iteration(config: GraphConfig) -> int:
    """Count the products of an iteration over the experts and the graph, of one position."""
    dim, inward = config.dim, config.adapter_rank + 1
    found = dim * config.adapter_rank
    if config.moe:
        inward += config.expert_dim + config.gate_dim
        found += config.gate_dim * config.experts + dim * config.expert_dim
        used = config.moe_top_k + config.shared_expert
        found += used * 3 * config.expert_dim * config.expert_ffn
    if config.graph:
        found += dim * config.code_dim
    return found + dim * inward


def _hnet(config: HNetConfig) -> float:
    """Count the products of an `HNet`, of a window."""
    lengths = [config.ctx]
    for chunk_length in config.chunk_length:
        lengths.append(lengths[-1] / chunk_length)
    dims = (*config.outer_dim, config.dim)
    main = config.main()
    found = lengths[-1] * main.layers * _block(main, lengths[-1])
    for stage, (length, chunks) in enumerate(itertools.pairwise(lengths)):
        own, inner = config.outer(stage), dims[stage + 1]
        if config.outer_blocks == "mamba":
            block = _mamba(own, config.states)
        else:
            block = _block(own, min(config.window, length))
        of_position = 2 * own.layers * block + own.dim**2  # encoder, decoder and residual
        if config.boundaries == "learned":
            of_position += 2 * own.dim**2
        found += length * of_position + chunks * 2 * own.dim * inner
    return found + config.ctx * VOCABULARY * config.outer_dim[0]


def _mamba(config: ModelConfig, states: int) -> int:
    """Count the products of a Mamba-2 block, of one position; of its scan as a recurrence."""
    inner = EXPAND * config.dim
    projection = config.dim * (2 * inner + 2 * states + EXPAND * config.heads)
    return projection + inner * config.dim + 2 * states * inner

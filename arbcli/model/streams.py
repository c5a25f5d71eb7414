"""`StreamsLM`: a `ByteLM` of several residual streams."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arbcli.config.dense import ModelConfig
from arbcli.model.blocks.hyper_connection import HyperConnection
from arbcli.model.cache import BlockCache, KeyValueCache
from arbcli.model.dense import Block, ByteLM
from arbcli.model.language_model import RECOMPUTE
from arbcli.model.layers.streams import average_streams, spread_streams


class StreamBlock(Block):
    """A block of several residual streams.

    Args:
        config: of the model.
        index: number of the block.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config)
        reads = (2 * index % config.streams, (2 * index + 1) % config.streams)
        self.attention_streams, self.mlp_streams = (HyperConnection(config, read) for read in reads)

    def forward(self, x: Tensor, past: BlockCache | None = None) -> Tensor:
        """Let both branches read and write the streams (B, T, n, D), perhaps after a past."""
        x = self.attention_streams(x, lambda h: self.attention(h, self.attention_norm, past))
        return self.mlp_streams(x, lambda h: self.mlp(h, self.mlp_norm))


class StreamsLM(ByteLM):
    """A language model over bytes whose blocks read and write several residual streams.

    Args:
        config: its shape and storage.
        compute_dtype: of activations; bfloat16, or float32.
        recompute: whether a backward computes what is inside a block again.
    """

    makes_several = False

    def make_blocks(self, config: ModelConfig) -> list[nn.Module]:
        """Make the blocks."""
        return [StreamBlock(config, index) for index in range(config.layers)]

    def forward(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Compute (B, T, 256) logits, in `compute_dtype`, from (B, T) int64 bytes.

        With a cache B is 1: the bytes follow on those that it has seen, and are added to it.
        """
        x = spread_streams(self.embedding(ids, self.compute_dtype), self.config.streams)
        if cache is not None:
            with cache.reading(ids.shape[1]):
                for block, past in zip(self.blocks, cache.blocks, strict=True):
                    x = block(x, past)
        else:
            recompute = self.recompute and torch.is_grad_enabled()
            for block in self.blocks:
                x = checkpoint(block, x, **RECOMPUTE) if recompute else block(x)
        return self.head(average_streams(x), self.norm)

"""`CompressedLM`: a `ByteLM` whose blocks attend to entries of several bytes."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arbcli.config.compressed import CompressedConfig
from arbcli.model.blocks.compressed_attention import CompressedAttention
from arbcli.model.blocks.compressed_cache import CompressedBlockCache, CompressedCache
from arbcli.model.blocks.mlp import MLP
from arbcli.model.dense import ByteLM, takes_one_position
from arbcli.model.language_model import RECOMPUTE
from arbcli.model.layers.kinds import layers_for


class CompressedBlock(nn.Module):
    """Compressed attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: CompressedConfig, index: int) -> None:
        super().__init__()
        parts = layers_for(config)
        self.attention_norm = parts.norm(config.dim, config)
        self.attention = CompressedAttention(config, index)
        self.mlp_norm = parts.norm(config.dim, config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add both branches to the stream (B, T, D); also give the indexer's divergence."""
        added, divergence = self.attention(x, self.attention_norm)
        added, x = self.mlp(x, self.mlp_norm, added)
        return x + added, divergence

    def linears(self) -> tuple[nn.Module, ...]:
        """List none: each is decoded by itself."""
        return ()

    def follow(self, x: Tensor, past: CompressedBlockCache) -> Tensor:
        """Do as `forward` does, after a past, with (1, T, D)."""
        x = x + self.attention(x, self.attention_norm, past)[0]
        return x + self.mlp(x, self.mlp_norm)

    def one_position(self, x: Tensor, past: CompressedBlockCache) -> Tensor:
        """Do as `forward` does with one position after a past: see `takes_one_position`."""
        return self.mlp.one_position(self.attention.one_position(x, past))


class CompressedLM(ByteLM):
    """A language model over bytes that attends to compressed positions.

    Args:
        config: its shape and storage.
        compute_dtype: of activations; bfloat16, or float32.
        recompute: whether a backward computes what is inside a block again.
    """

    config: CompressedConfig
    makes_several = False

    def make_blocks(self, config: CompressedConfig) -> list[nn.Module]:
        """Make the blocks."""
        return [CompressedBlock(config, index) for index in range(config.layers)]

    def forward(self, ids: Tensor, cache: CompressedCache | None = None) -> Tensor:
        """Compute (B, T, 256) logits, in `compute_dtype`, from (B, T) int64 bytes.

        With a cache B is 1: the bytes follow on those that it has seen, and are added to it.
        """
        if cache is None:
            return self.head(self._through(ids)[0], self.norm)
        x = self.embedding(ids, self.compute_dtype)
        with cache.reading(ids.shape[1]):
            pairs = zip(self.blocks, cache.blocks, strict=True)
            if takes_one_position(self, x, self.config):
                for block, past in pairs:
                    x = block.one_position(x, past)
                return self.head.fused(x, normalise=True)
            for block, past in pairs:
                x = block.follow(x, past)
        return self.head(x, self.norm)

    def new_cache(self, positions: int) -> CompressedCache:
        """Make a cache for a text of at most `positions` bytes; no gradient passes through it."""
        about = (self.config, positions, self.compute_dtype, self.device)
        return CompressedCache(*about, stored=self.stored)

    def losses(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the parts of the loss: `text`, and `indexer` where there are any."""
        x, divergences = self._through(ids)
        logits = self.head(x, self.norm)
        losses = {"text": self.cross_entropy(logits.flatten(0, 1), targets.flatten())}
        mean = {"indexer": sum(divergences) / len(divergences)} if divergences else {}
        return losses | mean

    def _through(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, divergences = self.embedding(ids, self.compute_dtype), []
        recompute = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x, divergence = checkpoint(block, x, **RECOMPUTE) if recompute else block(x)
            if divergence is not None:
                divergences.append(divergence)
        return x, divergences

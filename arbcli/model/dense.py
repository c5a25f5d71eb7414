"""`ByteLM`: byte embedding, blocks of attention and gated MLP, norm, byte head."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arbcli.config.dense import VOCABULARY, ModelConfig
from arbcli.kernels.matmul.arranged import fits_arranged
from arbcli.model.blocks.attention import Attention
from arbcli.model.blocks.mlp import MLP
from arbcli.model.cache import BlockCache, KeyValueCache, SeveralBlock, SeveralCache
from arbcli.model.language_model import RECOMPUTE, LanguageModel
from arbcli.model.layers.kinds import byte_head, layers_for
from arbcli.model.layers.linear import decode_in_groups


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__()
        parts = layers_for(config)
        self.attention_norm = parts.norm(config.dim, config)
        self.attention = Attention(config, window)
        self.mlp_norm = parts.norm(config.dim, config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, added: Tensor | None = None, *, whole: bool = True
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Add both branches to the stream.

        Args:
            x: the stream, (B, T, D).
            added: what is still to be added to it; None if there is nothing.
            whole: whether to add the last branch, too.

        Returns:
            The stream; and if it is not whole, what is still to be added, which the norm behind it
            does at no cost.
        """
        if added is None:
            added = self.attention(x, self.attention_norm)
        else:
            added, x = self.attention(x, self.attention_norm, added=added)
        added, x = self.mlp(x, self.mlp_norm, added)
        return x + added if whole else (x, added)

    def linears(self) -> tuple[nn.Module, ...]:
        """List the linear layers in the order of a forward."""
        return self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.output

    def follow(self, x: Tensor, added: Tensor | None, past: BlockCache) -> tuple[Tensor, Tensor]:
        """Do as `forward` does, after a past; what a branch adds is left to the norm behind it.

        Args:
            x: the stream, (1, T, D).
            added: what the block before adds to it; None if there is none.
            past: of this block.

        Returns:
            The stream, and what this block adds to it.
        """
        if added is None:
            added = self.attention(x, self.attention_norm, past)
        else:
            x, normal = self.attention_norm.of_sum(x, added)
            added = self.attention(normal, None, past)
        x, normal = self.mlp_norm.of_sum(x, added)
        return x, self.mlp(normal, None)

    def one_position(self, x: Tensor, past: BlockCache | SeveralBlock) -> Tensor:
        """Do as `forward` does with one position after a past: see `takes_one_position`.

        With the pasts of several texts, it is one position of each.
        """
        return self.mlp.one_position(self.attention.one_position(x, past))


def takes_one_position(model: LanguageModel, x: Tensor, config: ModelConfig) -> bool:
    """Whether a model's weights may be arranged for steps, and no norm has any.

    Args:
        model: whose weights they are.
        x: the stream that blocks are given.
        config: of these blocks.
    """
    fits = fits_arranged(x, config.group_size) and config.ffn % 8 == 0
    return fits and model.weights_are_prepared and model.plain_norms and model.fits_bytes


class ByteLM(LanguageModel):
    """A language model over bytes.

    Args:
        config: its shape and storage.
        compute_dtype: of activations; bfloat16, or float32.
        recompute: whether a backward computes what is inside a block again, so that only the
            blocks' inputs are kept for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        compute_dtype: torch.dtype = torch.bfloat16,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        parts = layers_for(config)
        self.config, self.compute_dtype, self.recompute = config, compute_dtype, recompute
        self.cross_entropy = parts.cross_entropy
        self.embedding = parts.embedding(VOCABULARY, config.dim, config, area="embedding")
        self.blocks = nn.ModuleList(self.make_blocks(config))
        self.norm = parts.norm(config.dim, config)
        self.head = byte_head(config)
        if config.weights == "ternary":
            decode_in_groups([[part.weight for part in b.linears()] for b in self.blocks])

    def make_blocks(self, config: ModelConfig) -> list[nn.Module]:
        """Make the blocks."""
        return [Block(config) for _ in range(config.layers)]

    def forward(self, ids: Tensor, cache: KeyValueCache | SeveralCache | None = None) -> Tensor:
        """Compute (B, T, 256) logits, in `compute_dtype`, from (B, T) int64 bytes.

        With a cache B is 1: the bytes follow on those that it has seen, and are added to it. With
        one of several texts T is 1, if `makes_several`.
        """
        x = self.embedding(ids, self.compute_dtype)
        if cache is not None:
            with cache.reading(ids.shape[1]):
                if takes_one_position(self, x, self.config):
                    for block, past in zip(self.blocks, cache.blocks, strict=True):
                        x = block.one_position(x, past)
                    return self.head.fused(x, normalise=True)
                added = None
                for block, past in zip(self.blocks, cache.blocks, strict=True):
                    x, added = block.follow(x, added, past)
            return self.head(self.norm.of_sum(x, added)[1])
        if self.recompute and torch.is_grad_enabled():
            for block in self.blocks:
                x = checkpoint(block, x, **RECOMPUTE)
            return self.head(x, self.norm)
        added, watched = None, any(block._forward_hooks for block in self.blocks)
        for block in self.blocks:
            if watched:  # who looks at a block's output looks at the whole stream
                x = block(x)
            else:
                x, added = block(x, added, whole=False)
        return self.head(x, self.norm) if watched else self.head(x, self.norm, added)[0]

    def new_cache(self, positions: int) -> KeyValueCache:
        """Make a cache for a text of at most `positions` bytes; no gradient passes through it."""
        about = (self.config, positions, self.compute_dtype, self.device)
        return KeyValueCache(*about, stored=self.stored)

    @property
    def makes_several(self) -> bool:
        """Whether steps of several texts are computed together, each with the bits it has alone."""
        config = self.config
        x = torch.empty(2, 1, config.dim, dtype=self.compute_dtype, device=self.device)
        fits = fits_arranged(x, config.group_size) and config.ffn % 8 == 0 and self.plain_norms
        return fits and config.weights == "ternary" and not self.head.weight.rule.reads_all

    def new_several_cache(self, texts: int, positions: int) -> SeveralCache:
        """Make a cache for several texts of at most `positions` bytes each."""
        return SeveralCache(self.config, texts, positions, self.compute_dtype, self.device)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Average the cross-entropy, in nats a byte, over (B, T) int64 inputs and targets."""
        return self.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

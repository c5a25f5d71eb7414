"""`ByteLM`: byte embedding, blocks of attention and gated MLP, norm, byte head."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.kernels.matmul.arranged_matmul import takes
from arbcli.model import baselines as twins
from arbcli.model.cache import BlockCache, KeyValueCache
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.embedding import TernaryEmbedding
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.loss import cross_entropy
from arbcli.model.layers.norm import TernaryGate, TernaryRMSNorm
from arbcli.model.layers.rotary import rotary_norm
from arbcli.model.layers.streamed import recompute_contexts

RECOMPUTE = {
    "use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none",
    "context_fn": recompute_contexts,
}  # fmt: skip
"""How torch is to compute a block again: there is no dropout, and shapes do not change."""


class _Parts:
    """The layers of one kind of weights."""

    def __init__(self, config: ModelConfig) -> None:
        ternary = config.weights == "ternary"
        self.linear = TernaryLinear if ternary else twins.FloatLinear
        self.embedding = TernaryEmbedding if ternary else twins.FloatEmbedding
        self.norm = TernaryRMSNorm if ternary else twins.FloatRMSNorm
        self.gate = TernaryGate if ternary else twins.FloatGate
        self.rotary_norm = rotary_norm if ternary else twins.FloatRotaryNorm(config)
        self.cross_entropy = cross_entropy if ternary else twins.cross_entropy


class Attention(nn.Module):
    """Causal self-attention over rotary positions, with normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = _Parts(config)
        self.heads, self.rotary_norm = config.heads, parts.rotary_norm
        self.qkv = parts.linear(3 * config.dim, config.dim, config)
        self.sub_norm = parts.norm(config.dim, config) if config.sub_norms else None
        self.output = parts.linear(config.dim, config.dim, config)

    def forward(self, x: Tensor, norm: nn.Module | None, past: BlockCache | None = None) -> Tensor:
        """Normalise (B, T, D) and mix every position with those before it, and with the past.

        Without a norm, x was normalised before.
        """
        batch, length, dim = x.shape
        qkv = self.qkv(x, norm).view(batch, length, 3, self.heads, dim // self.heads)
        if past is None:
            q, k, v = self.rotary_norm(qkv)  # (B, heads, T, head_dim) each
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif length == 1:
            y = past.attend_one(qkv)
        else:
            y = past.attend(*self.rotary_norm(qkv, past.angles))
        return self.output(y.transpose(1, 2).reshape(batch, length, dim), self.sub_norm)

    def step(self, x: Tensor, past: BlockCache) -> Tensor:
        """Normalise one position of the stream, mix it with the past, and add that to it."""
        qkv = self.qkv.step(x, normalise=True)
        y = past.attend_one(qkv.view(1, 1, 3, self.heads, -1)).view(x.shape)
        return self.output.step(y, normalise=self.sub_norm is not None, added=x)


class MLP(nn.Module):
    """Gated MLP: down(norm(silu(gate) * up))."""

    def __init__(self, config: ModelConfig, ffn: int | None = None) -> None:
        super().__init__()
        parts, ffn = _Parts(config), ffn or config.ffn
        self.gate_up = parts.linear(2 * ffn, config.dim, config)
        self.sub_norm = parts.gate(ffn, config, normalise=config.sub_norms)
        self.output = parts.linear(config.dim, ffn, config)

    def forward(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Normalise as `Attention` does, and transform every position of (B, T, D) by itself."""
        return self.output(self.gate_up(x, norm), self.sub_norm)

    def step(self, x: Tensor) -> Tensor:
        """Normalise one position of the stream, transform it, and add that to it."""
        hidden = self.gate_up.step(x, normalise=True, gated=True)
        return self.output.step(hidden, normalise=self.sub_norm.weight is not None, added=x)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = _Parts(config)
        self.attention_norm = parts.norm(config.dim, config)
        self.attention = Attention(config)
        self.mlp_norm = parts.norm(config.dim, config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to the stream (B, T, D)."""
        x = x + self.attention(x, self.attention_norm)
        return x + self.mlp(x, self.mlp_norm)

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
            x, normal = self.attention_norm.after(x, added)
            added = self.attention(normal, None, past)
        x, normal = self.mlp_norm.after(x, added)
        return x, self.mlp(normal, None)


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
        parts = _Parts(config)
        self.config, self.compute_dtype, self.recompute = config, compute_dtype, recompute
        self.cross_entropy = parts.cross_entropy
        self.embedding = parts.embedding(VOCABULARY, config.dim, config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = parts.norm(config.dim, config)
        self.head = parts.linear(VOCABULARY, config.dim, config)

    def forward(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Compute (B, T, 256) logits, in `compute_dtype`, from (B, T) int64 bytes.

        With a cache B is 1: the bytes follow on those that it has seen, and are added to it.
        """
        x = self.embedding(ids, self.compute_dtype)
        if cache is not None:
            with cache.reading(ids.shape[1]):
                if self._takes_steps(x):
                    for block, past in zip(self.blocks, cache.blocks, strict=True):
                        x = block.mlp.step(block.attention.step(x, past))
                    return self.head.step(x, normalise=True)
                added = None
                for block, past in zip(self.blocks, cache.blocks, strict=True):
                    x, added = block.follow(x, added, past)
            return self.head(self.norm.after(x, added)[1])
        recompute = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, **RECOMPUTE) if recompute else block(x)
        return self.head(x, self.norm)

    def _takes_steps(self, x: Tensor) -> bool:
        """Whether there are kernels for a step from the stream x, and no norm has weights."""
        fits = takes(x, self.config.group_size) and self.config.ffn % 8 == 0
        return fits and self.plain_norms

    def new_cache(self, positions: int) -> KeyValueCache:
        """Make a cache for a text of at most `positions` bytes; no gradient passes through it."""
        return KeyValueCache(self.config, positions, self.compute_dtype, self.device)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Average the cross-entropy, in nats a byte, over (B, T) int64 inputs and targets."""
        return self.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

"""`ByteLM`: byte embedding, blocks of attention and gated MLP, norm, byte head."""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.model.config import VOCABULARY, ModelConfig
from arbcli.model.layers import (
    NORM_EPS,
    StreamedTensor,
    TernaryEmbedding,
    TernaryLinear,
    TernaryRMSNorm,
)
from arbcli.model.ternary import TernaryTensor
from arbcli.model.twins import FloatEmbedding, FloatLinear, FloatRMSNorm, FloatWeight

ROTARY_BASE = 10000.0


@lru_cache(maxsize=8)
def rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position's angles, (length, head_dim / 2) float32 each.

    A derived constant: it follows from the configuration, so it is cached here and no part of the
    state. Source: J. Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, eq. 15.
    """
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of (..., T, head_dim) by the angle of their position, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class _Parts:
    """The layer classes of one kind of weights."""

    def __init__(self, config: ModelConfig) -> None:
        ternary = config.weights == "ternary"
        self.linear = TernaryLinear if ternary else FloatLinear
        self.embedding = TernaryEmbedding if ternary else FloatEmbedding
        self.norm = TernaryRMSNorm if ternary else FloatRMSNorm


class Attention(nn.Module):
    """Causal self-attention over rotary positions, with normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = _Parts(config)
        self.heads = config.heads
        self.qkv = parts.linear(3 * config.dim, config.dim, config)
        self.sub_norm = parts.norm(config.dim, config) if config.sub_norms else nn.Identity()
        self.output = parts.linear(config.dim, config.dim, config)

    def forward(self, x: Tensor) -> Tensor:
        """Mix (B, T, D) over the positions before each."""
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, head_dim) each
        cos, sin = rotary_table(length, q.shape[-1], x.device)
        q, k = (
            functional.rms_norm(rotate(t, cos, sin), t.shape[-1:], eps=NORM_EPS).to(x.dtype)
            for t in (q, k)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(self.sub_norm(y.transpose(1, 2).reshape(batch, length, dim)))


class MLP(nn.Module):
    """Gated MLP: down(silu(gate) * up)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = _Parts(config)
        self.gate_up = parts.linear(2 * config.ffn, config.dim, config)
        self.sub_norm = parts.norm(config.ffn, config) if config.sub_norms else nn.Identity()
        self.output = parts.linear(config.dim, config.ffn, config)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of (B, T, D) by itself."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.output(self.sub_norm(functional.silu(gate) * up))


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
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """A language model over bytes.

    Args:
        config: its shape and storage.
        compute_dtype: of activations; bfloat16, or float32.
    """

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        parts = _Parts(config)
        self.config, self.compute_dtype = config, compute_dtype
        self.embedding = parts.embedding(VOCABULARY, config.dim, config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = parts.norm(config.dim, config)
        self.head = parts.linear(VOCABULARY, config.dim, config)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute (B, T, 256) logits, in `compute_dtype`, from (B, T) int64 bytes."""
        x = self.embedding(ids, self.compute_dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Average the cross-entropy, in nats a byte, over (B, T) int64 inputs and targets."""
        logits = self(ids)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def initialise(self, seed: int) -> None:
        """Draw all weights anew.

        | weight | standard deviation |
        |---|---|
        | embedding | 1 |
        | projections of K inputs | min(0.1, 1 / sqrt(K)) |
        | output projections of attention and MLP | the same / sqrt(2 * layers) |
        | head | 1 / sqrt(dim) |
        | norms | exactly 1 each |
        """
        for index, (name, weight) in enumerate(self.weights().items()):
            out_scale = math.sqrt(2 * self.config.layers) if name.endswith("output.weight") else 1
            if isinstance(weight, TernaryTensor) and weight.frozen:
                weight.fill(1)
            elif name == "embedding.weight":
                weight.initialise(1.0, seed, index)
            else:
                in_features = _in_features(weight)
                std = 1 / math.sqrt(in_features)
                std = std if name == "head.weight" else min(0.1, std)
                weight.initialise(std / out_scale, seed, index)

    def forget_uses(self) -> None:
        """Forget forwards whose backward never came, as after an error."""
        for weight in self.weights().values():
            if isinstance(weight, StreamedTensor):
                weight.forget()

    def weights(self) -> dict[str, TernaryTensor | FloatWeight]:
        """Name every weight, in the order of the model."""
        kinds = (TernaryTensor, FloatWeight)
        return {name: part for name, part in self.named_modules() if isinstance(part, kinds)}


def _in_features(weight: TernaryTensor | FloatWeight) -> int:
    return weight.in_features if isinstance(weight, TernaryTensor) else weight.latent.shape[1]

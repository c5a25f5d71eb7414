"""The same layers with float weights, to compare with: plain, or ternary by straight-through."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.model.config import ModelConfig
from arbcli.model.layers import NORM_EPS


class FloatWeight(nn.Module):
    """A float32 matrix; with `ste` its forward is ternary, the gradient passing straight through.

    w = clip(round(latent / s), -1, 1) * s with s = mean |latent| over the matrix.
    Source: S. Ma et al., "The Era of 1-bit LLMs", https://arxiv.org/abs/2402.17764, eq. 1-3.
    """

    def __init__(self, out_features: int, in_features: int, config: ModelConfig) -> None:
        super().__init__()
        self.straight_through = config.weights == "ste"
        self.latent = nn.Parameter(torch.empty(out_features, in_features))

    @torch.no_grad()
    def initialise(self, std: float, seed: int, index: int) -> None:
        """Draw from a normal distribution; `seed` and `index` decide, not the global generator."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        self.latent.copy_(torch.randn(self.latent.shape, generator=generator) * std)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Make what the forward multiplies by: (N, K) of `dtype`."""
        weight = self.latent
        if self.straight_through:
            scale = weight.detach().abs().mean()
            ternary = (weight.detach() / scale).round().clamp(-1, 1) * scale
            weight = weight + (ternary - weight.detach())
        return weight.to(dtype)


class FloatLinear(nn.Module):
    """y = x @ w.T with float or straight-through weights."""

    def __init__(self, out_features: int, in_features: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = FloatWeight(out_features, in_features, config)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (..., K) activations to (..., N) of the same dtype."""
        return functional.linear(x, self.weight.weight(x.dtype))


class FloatEmbedding(nn.Module):
    """Look up rows of a float or straight-through table."""

    def __init__(self, num_embeddings: int, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = FloatWeight(num_embeddings, dim, config)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn (...) int64 ids into (..., D) vectors of `dtype`."""
        return functional.embedding(ids, self.weight.weight(dtype))


class FloatRMSNorm(nn.Module):
    """Divide by the root-mean-square; no gain, as the ternary norm's stays the identity."""

    def __init__(self, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D), in float32."""
        return functional.rms_norm(x.float(), (self.dim,), eps=NORM_EPS).to(x.dtype)

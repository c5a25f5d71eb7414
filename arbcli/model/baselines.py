"""The same layers with float weights, to compare with: plain, or ternary by straight-through."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.config.site import Site
from arbcli.kernels.attention.rotation import rotate
from arbcli.kernels.matmul.grouped_matmul import grouped_grad_w, grouped_matmul
from arbcli.kernels.streams.mix_streams import mix_streams_torch
from arbcli.model.initial import head_std, projection_std
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.norm import NORM_EPS, clamp_halves
from arbcli.model.layers.rotary import rotary_table
from arbcli.model.layers.table import SPARSE_SPREAD

TINY = 1e-30
"""Least scale: a matrix of zeros, which some are at the start, has none."""


class FloatWeight(nn.Module):
    """A float32 matrix; with `ste` its forward is ternary, the gradient passing straight through.

    w = clip(round(latent / s), -1, 1) * s with s = mean |latent| over the matrix.
    Source: S. Ma et al., "The Era of 1-bit LLMs", https://arxiv.org/abs/2402.17764, eq. 1-3.
    """

    def __init__(self, out_features: int, in_features: int, site: Site, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.straight_through = site.weights == "ste"
        self.latent = nn.Parameter(torch.empty(out_features, in_features))
        self._cast: Tensor | None = None

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Draw from a normal distribution; `seed` and `index` decide, not the global generator."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        self.latent.copy_(torch.randn(self.latent.shape, generator=generator) * self.std)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Make what the forward multiplies by: (N, K) of `dtype`; or give what was made of it."""
        if self._cast is not None and self._cast.dtype == dtype:
            return self._cast
        weight = self.latent
        if self.straight_through:
            scale = weight.detach().abs().mean().clamp(min=TINY)
            ternary = (weight.detach() / scale).round().clamp(-1, 1) * scale
            return (weight + (ternary - weight.detach())).to(dtype)
        return weight.to(dtype)

    @contextmanager
    def cast_once(self, dtype: torch.dtype) -> Iterator[None]:
        """Make the weight once for many forwards; meanwhile it must not be trained."""
        with torch.no_grad():
            self._cast = self.weight(dtype)
        try:
            yield
        finally:
            self._cast = None


class FloatLinear(nn.Module):
    """y = x @ w.T with float or straight-through weights; it takes what `TernaryLinear` does."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        site: Site,
        *,
        area: str,
        std: float | None = None,
        spread: float = 1.0,
        lr_factor: float | None = None,
        in_eight_bits: bool = False,
    ) -> None:
        super().__init__()
        std = (std or projection_std(in_features)) if spread else 0.0
        self.weight = FloatWeight(out_features, in_features, site, std=std)

    def forward(
        self,
        x: Tensor,
        before: nn.Module | None = None,
        added: Tensor | None = None,
        *,
        consumes: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply `before` and multiply (..., K) activations to (..., N) of the same dtype.

        What is `added` to x comes first, and then the sum is returned, too. Autograd keeps what it
        needs, whatever may be consumed.
        """
        if added is not None:
            x = x + added
            return self(x, before), x
        return functional.linear(before(x) if before else x, self.weight.weight(x.dtype))


class FloatEmbedding(nn.Module):
    """Look up rows of a float or straight-through table."""

    def __init__(
        self, num_embeddings: int, dim: int, site: Site, *, area: str, tied: bool = False
    ) -> None:
        super().__init__()
        std = head_std(dim) if tied else 1.0
        self.weight = FloatWeight(num_embeddings, dim, site, std=std)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn (...) int64 ids into (..., D) vectors of `dtype`.

        Where gradients are wanted the cast comes last, so that those of a row are added in float32.
        """
        table = self.weight.weight(torch.float32 if torch.is_grad_enabled() else dtype)
        return functional.embedding(ids, table).to(dtype)


class FloatTable(nn.Module):
    """Add up weighted rows of a float or straight-through table; it takes what `TernaryTable` does.

    Rows begin as small as there, where nearly all trits are zero.
    """

    def __init__(self, num_rows: int, dim: int, site: Site, *, area: str) -> None:
        super().__init__()
        std = SPARSE_SPREAD * projection_std(dim)
        self.weight = FloatWeight(num_rows, dim, site, std=std)

    def forward(self, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn (M, k) int64 ids and float32 weights into (M, D) of `dtype`, added in float32.

        An id outside of the table, such as -1, is not a row.
        """
        table = self.weight.weight(torch.float32)
        there = (ids >= 0) & (ids < len(table))
        rows = functional.embedding(ids * there, table)
        return torch.einsum("mk,mkd->md", weights * there, rows).to(dtype)


class FloatVector(nn.Module):
    """A float vector of n numbers; it takes what `TernaryVector` does."""

    def __init__(self, values: Sequence[float], site: Site, *, area: str) -> None:
        super().__init__()
        self.weight = FloatNumbers(len(values), 1, site, std=0.0)
        self.weight.values = tuple(values)

    def forward(self) -> Tensor:
        """Read (n,) float32."""
        return self.weight.latent.flatten()


class FloatTaps(nn.Module):
    """Float taps, so many for each channel; it takes what `TernaryTaps` does."""

    def __init__(self, channels: int, taps: int, site: Site, *, area: str) -> None:
        super().__init__()
        self.weight = FloatNumbers(channels, taps, site, std=1 / math.sqrt(taps))

    def forward(self) -> Tensor:
        """Read (D, W) float32."""
        return self.weight.latent


class FloatNumbers(FloatWeight):
    """Float32 numbers that are read as they are; `values`, if there are any, are the first ones."""

    values: tuple[float, ...] | None = None

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Set the first values, or draw them."""
        super().initialise(seed, index)
        if self.values is not None:
            self.latent.copy_(torch.tensor(self.values)[:, None])


class FloatRMSNorm(nn.Module):
    """Divide by the root-mean-square; no gain, as the ternary norm's stays the identity."""

    def __init__(self, dim: int, site: Site) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D), in float32."""
        return functional.rms_norm(x.float(), (self.dim,), eps=NORM_EPS).to(x.dtype)

    def of_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, and that normalised."""
        x = x + added
        return x, self(x)


class FloatGainedRMSNorm(FloatVector):
    """Divide by the root-mean-square, then multiply by float gains, which begin as ones."""

    def __init__(self, dim: int, site: Site) -> None:
        super().__init__([1.0] * dim, site, area="norms")
        self.eps = site.norm_eps

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise the last dimension of (..., D), in float32."""
        gain = super().forward()
        return functional.rms_norm(x.float(), gain.shape, gain, eps=self.eps).to(x.dtype)


class FloatGate(FloatRMSNorm):
    """The middle of a gated MLP: silu of the first half times the second, normalised or not."""

    def __init__(self, dim: int, site: Site, *, normalise: bool) -> None:
        super().__init__(dim, site)
        self.normalise = normalise

    def forward(self, gate_up: Tensor) -> Tensor:
        """Turn (..., 2 D) into (..., D)."""
        gate, up = gate_up.chunk(2, dim=-1)
        product = functional.silu(gate) * up
        return super().forward(product) if self.normalise else product


class FloatClampedGate(FloatGate):
    """A `FloatGate` of bounded inputs: see `arbcli.model.layers.norm.ClampedGate`."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """Turn (..., 2 D) into (..., D)."""
        return super().forward(clamp_halves(gate_up))


class FloatExpertWeight(FloatWeight):
    """One float matrix for each expert, one above the other; it takes what `ExpertWeight` does."""

    def __init__(
        self,
        experts: int,
        out_features: int,
        in_features: int,
        site: Site,
        *,
        area: str,
        std: float | None = None,
    ) -> None:
        rows = experts * out_features
        super().__init__(rows, in_features, site, std=std or projection_std(in_features))
        self.experts = experts

    def multiply(self, x: Tensor, bounds: Tensor, before: nn.Module | None) -> Tensor:
        """Multiply the slots of each expert, (S, K), by its matrix: (S, N).

        On a GPU in bf16 this is torch's grouped product; elsewhere our own.
        """
        x = before(x) if before else x
        w = self.weight(x.dtype).unflatten(0, (self.experts, -1))
        if x.is_cuda and x.dtype == torch.bfloat16:
            return torch._grouped_mm(x, w.transpose(1, 2), offs=bounds[1:].to(torch.int32))
        return _grouped_product(x, w, bounds)


class _GroupedProduct(Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bounds: Tensor) -> Tensor:
        return grouped_matmul(x, w, bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, w, bounds = ctx.saved_tensors
        return grouped_matmul(grad_y, w.mT, bounds), grouped_grad_w(grad_y, x, bounds), None


_grouped_product = operator(_GroupedProduct, lambda x, w, bounds: x.new_empty(len(x), w.shape[1]))


class FloatRotaryAngles(nn.Module):
    """The angles of positions: see `rotary_table`.

    The table is a buffer, so that a compiler reads it and does not trace how it was made.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, ctx: int, head_width: int, rotary: RotaryConfig = PLAIN) -> None:
        super().__init__()
        table = rotary_table(ctx, head_width, torch.empty(0).device, rotary=rotary)
        for name, part in zip(("cos", "sin"), table, strict=True):
            self.register_buffer(name, part, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give the rows of the positions of (B, T, ...)."""
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]


class FloatRotaryNorm(FloatRotaryAngles):
    """Turn queries and keys by the angles of their positions, and normalise each head."""

    def forward(  # type: ignore[override]
        self, qkv: Tensor, table: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turn (B, T, 3, heads, d) into queries, keys and values, (B, heads, T, d) each.

        `table` is T rows of a `rotary_table`; None is its first ones, for positions from 0 on.
        """
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        cos, sin = table or super().forward(qkv)
        q, k = (
            functional.rms_norm(rotate(t, cos, sin), t.shape[-1:], eps=NORM_EPS).to(qkv.dtype)
            for t in (q, k)
        )
        return q, k, v


class FloatTurnedHeads(FloatRotaryAngles):
    """Normalise, scale and turn queries and keys: see `turned_heads`."""

    def forward(  # type: ignore[override]
        self,
        qkv: Tensor,
        gains: Tensor | None,
        kv: int,
        eps: float | None,
        table: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Part (B, T, H, d) into queries, keys and values, (B, their heads, T, d)."""
        angles = table or super().forward(qkv)
        q, k, v = qkv.transpose(1, 2).split((qkv.shape[2] - 2 * kv, kv, kv), dim=1)

        def turned(x: Tensor, part: int) -> Tensor:
            y = x.float()
            if eps is not None:
                gain = None if gains is None else gains[part]
                y = functional.rms_norm(y, y.shape[-1:], gain, eps)
            return rotate(y, *angles).to(x.dtype)

        return turned(q, 0), turned(k, 1), v


def mix_streams(
    x: Tensor, weights: Tensor, added: Tensor | None = None, gains: Tensor | None = None
) -> Tensor:
    """Mix streams by plain operations: see `arbcli.kernels.streams.mix_streams`."""
    return mix_streams_torch(x, weights, added, gains)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy of (M, V) logits and (M,) int64 targets: nats, float32 scalar."""
    return functional.cross_entropy(logits.float(), targets)

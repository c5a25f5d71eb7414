"""Layers with float32 weights for baselines: plain, or ternary with a straight-through estimator.

Each layer has the interface of its packed counterpart in `arbcli.model.layers`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.kernels.attention.rotary_norm import rotate
from arbcli.model.initial import head_std, projection_std
from arbcli.model.layers.norm import NORM_EPS, clamp_halves
from arbcli.model.layers.rotary import rotary_table
from arbcli.model.layers.table import SPARSE_SPREAD
from arbcli.model.packed import Weight

TINY = 1e-30
"""Minimum scale, for matrices that are initialised to zero."""


@contextmanager
def averaged_latents(averages: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Read the averages of latents, (N, K) float32 each, in place of these within the block."""
    latents = {latent: latent.data for latent in averages}
    for latent, average in averages.items():
        latent.data = average
    try:
        yield
    finally:
        for latent, data in latents.items():
            latent.data = data


class FloatWeight(Weight):
    """A float32 matrix; with `ste` the forward uses ternary weights, and the gradient ignores that.

    w = clip(round(latent / s), -1, 1) * s with s = mean |latent| over the matrix.
    Source: S. Ma et al., "The Era of 1-bit LLMs", https://arxiv.org/abs/2402.17764, eq. 1-3.
    """

    def __init__(self, out_features: int, in_features: int, spec: LayerSpec, *, std: float) -> None:
        super().__init__()
        self.out_features, self.in_features, self.std = out_features, in_features, std
        self.kinds = {"latent": "latent"}
        """Purpose of its parameter, as in `StateModule`."""
        self.straight_through = spec.weights == "ste"
        self.latent = nn.Parameter(torch.empty(out_features, in_features))
        self._cast: Tensor | None = None

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return self.latent.numel()

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Draw from a normal distribution that only depends on `seed` and `index`."""
        generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + index)
        # on the CPU, whatever the device of the context: see `build_model`
        normal = torch.randn(self.latent.shape, generator=generator, device="cpu")
        self.latent.copy_(normal * self.std)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that the forward multiplies by, (N, K) of `dtype`."""
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
        """Cache the cast weight for many forward passes; it must not be trained meanwhile."""
        with torch.no_grad():
            self._cast = self.weight(dtype)
        try:
            yield
        finally:
            self._cast = None


class FloatLinear(nn.Module):
    """y = x @ w.T with float or straight-through weights; the counterpart of `TernaryLinear`."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        spec: LayerSpec,
        *,
        area: str,
        std: float | None = None,
        spread: float = 1.0,
        lr_factor: float | None = None,
        low_precision: bool = False,
    ) -> None:
        super().__init__()
        std = (std or projection_std(in_features)) if spread else 0.0
        self.weight = FloatWeight(out_features, in_features, spec, std=std)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None = None,
        added: Tensor | None = None,
        *,
        consumes: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Multiply norm(x) by the weight: (..., K) to (..., N) of the same dtype.

        With `added`, x + added takes the place of x and is returned too. `consumes` has no effect,
        as autograd saves its inputs.
        """
        if added is not None:
            x = x + added
            return self(x, norm), x
        return functional.linear(norm(x) if norm else x, self.weight.weight(x.dtype))


class FloatEmbedding(nn.Module):
    """Look up rows of a float or straight-through table."""

    def __init__(
        self, num_embeddings: int, dim: int, spec: LayerSpec, *, area: str, tied: bool = False
    ) -> None:
        super().__init__()
        self.weight = FloatWeight(num_embeddings, dim, spec, std=head_std(dim) if tied else 1.0)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up (...) int64 ids: (..., D) of `dtype`.

        While gradients are recorded the cast comes last, so that those of a row are summed in
        float32.
        """
        table = self.weight.weight(torch.float32 if torch.is_grad_enabled() else dtype)
        return functional.embedding(ids, table).to(dtype)


class FloatTable(nn.Module):
    """Weighted sums of rows of a float or straight-through table; counterpart of `TernaryTable`.

    The initial standard deviation is also that of `TernaryTable`, whose trits are nearly all zero.
    """

    def __init__(self, num_rows: int, dim: int, spec: LayerSpec, *, area: str) -> None:
        super().__init__()
        self.weight = FloatWeight(num_rows, dim, spec, std=SPARSE_SPREAD * projection_std(dim))

    def forward(self, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum the rows of (M, k) int64 ids with float32 weights: (M, D) of `dtype`.

        Ids outside of the table, such as -1, are ignored. Sums are in float32.
        """
        table = self.weight.weight(torch.float32)
        valid = (ids >= 0) & (ids < len(table))
        rows = functional.embedding(ids * valid, table)
        return torch.einsum("mk,mkd->md", weights * valid, rows).to(dtype)


class FloatVector(nn.Module):
    """A float vector of n numbers; the counterpart of `TernaryVector`."""

    def __init__(self, values: Sequence[float], spec: LayerSpec, *, area: str) -> None:
        super().__init__()
        self.weight = FloatNumbers(len(values), 1, spec, std=0.0)
        self.weight.values = tuple(values)

    def forward(self) -> Tensor:
        """Return the vector, (n,) float32."""
        return self.weight.latent.flatten()


class FloatTaps(nn.Module):
    """Float taps of a depthwise convolution; the counterpart of `TernaryTaps`."""

    def __init__(self, channels: int, taps: int, spec: LayerSpec, *, area: str) -> None:
        super().__init__()
        self.weight = FloatNumbers(channels, taps, spec, std=1 / math.sqrt(taps))

    def forward(self) -> Tensor:
        """Return the taps, (D, W) float32."""
        return self.weight.latent


class FloatNumbers(FloatWeight):
    """Float32 numbers that are never quantised; `values` are their initial values, if given."""

    values: tuple[float, ...] | None = None

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Set the initial values, or draw them from a normal distribution."""
        super().initialise(seed, index)
        if self.values is not None:
            self.latent.copy_(torch.tensor(self.values)[:, None])


class FloatRMSNorm(nn.Module):
    """RMS norm without gain, as the gain of `TernaryRMSNorm` is always 1."""

    def __init__(self, dim: int, spec: LayerSpec) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D), in float32."""
        return functional.rms_norm(x.float(), (self.dim,), eps=NORM_EPS).to(x.dtype)

    def add_and_norm(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, (..., D), and the normalised sum."""
        x = x + added
        return x, self(x)


class FloatGainedRMSNorm(FloatVector):
    """RMS norm with trained float gains, initially 1."""

    def __init__(self, dim: int, spec: LayerSpec) -> None:
        super().__init__([1.0] * dim, spec, area="norms")
        self.eps = spec.norm_eps

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise the last dimension of (..., D), in float32."""
        gain = super().forward()
        return functional.rms_norm(x.float(), gain.shape, gain, eps=self.eps).to(x.dtype)


class FloatGate(FloatRMSNorm):
    """silu(gate) * up of a gated MLP, with an optional RMS norm."""

    def __init__(self, dim: int, spec: LayerSpec, *, normalise: bool) -> None:
        super().__init__(dim, spec)
        self.normalise = normalise

    def forward(self, gate_up: Tensor) -> Tensor:
        """Compute (..., D) from gate and up, the halves of (..., 2 D)."""
        gate, up = gate_up.chunk(2, dim=-1)
        product = functional.silu(gate) * up
        return super().forward(product) if self.normalise else product


class FloatClampedGate(FloatGate):
    """A `FloatGate` with clamped inputs: see `arbcli.model.layers.norm.ClampedGate`."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """Compute (..., D) from gate and up, the halves of (..., 2 D)."""
        return super().forward(clamp_halves(gate_up))


class FloatRotaryAngles(nn.Module):
    """The table of rotary angles: see `rotary_table`.

    It is a buffer, so that a compiler does not trace its computation.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, ctx: int, head_width: int, rotary: RotaryConfig = PLAIN) -> None:
        super().__init__()
        table = rotary_table(ctx, head_width, torch.empty(0).device, rotary=rotary)
        for name, part in zip(("cos", "sin"), table, strict=True):
            self.register_buffer(name, part, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the T positions of x, (B, T, ...)."""
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]


class FloatRotaryNorm(FloatRotaryAngles):
    """Rotate queries and keys (RoPE), and normalise each head."""

    def forward(  # type: ignore[override]
        self, qkv: Tensor, table: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split (B, T, 3, heads, d) into queries, keys and values, (B, heads, T, d) each.

        `table` has T rows of a `rotary_table`; None is the first T, for positions from 0.
        """
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        cos, sin = table or super().forward(qkv)
        q, k = (
            functional.rms_norm(rotate(t, cos, sin), t.shape[-1:], eps=NORM_EPS).to(qkv.dtype)
            for t in (q, k)
        )
        return q, k, v


class FloatRotaryQKV(FloatRotaryAngles):
    """Normalise, scale and rotate queries and keys: see `rotary_qkv`."""

    def forward(  # type: ignore[override]
        self,
        qkv: Tensor,
        gains: Tensor | None,
        kv: int,
        eps: float | None,
        table: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split (B, T, H, d) into queries, keys and values, (B, their heads, T, d)."""
        angles = table or super().forward(qkv)
        q, k, v = qkv.transpose(1, 2).split((qkv.shape[2] - 2 * kv, kv, kv), dim=1)

        def rotated(x: Tensor, part: int) -> Tensor:
            y = x.float()
            if eps is not None:
                gain = None if gains is None else gains[part]
                y = functional.rms_norm(y, y.shape[-1:], gain, eps)
            return rotate(y, *angles).to(x.dtype)

        return rotated(q, 0), rotated(k, 1), v


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy of (M, V) logits and (M,) int64 targets, in nats."""
    return functional.cross_entropy(logits.float(), targets)

"""Root-mean-square norms with packed weights, and the middle of a gated MLP."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from arbcli.config.dense import ModelConfig
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.norm.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
from arbcli.kernels.norm.norm_e4m3 import gated_rms_norm_e4m3, rms_norm_e4m3
from arbcli.kernels.norm.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from arbcli.model.packed import TernaryTensor

NORM_EPS = 1e-6


class TernaryRMSNorm(nn.Module):
    """Divide by the root-mean-square, then multiply by frozen ternary weights, all ones.

    A norm is part of the linear layer behind it, which differentiates it: see `TernaryLinear`.
    """

    def __init__(self, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = TernaryTensor(1, dim, config, area="norms", frozen=True)
        self._held: Tensor | None = None
        self.plain = False
        """Whether the weights are held, and known to be ones."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D); not differentiable."""
        return rms_norm(x, *self._norm(), self._held)

    @torch.no_grad()
    def after(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, and that normalised; not differentiable."""
        return add_rms_norm(x, added, *self._norm(), self._held)

    @torch.no_grad()
    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise (M, D), and round rows to e4m3: numbers and scales; not differentiable."""
        return rms_norm_e4m3(x, *self._norm())

    def backward(self, grad_y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, and the result again."""
        return rms_norm_backward(grad_y, x, *self._norm())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Decode the weights once for many forwards; meanwhile they must not change."""
        self.plain = True
        if self.weight is not None:
            packed, *scales, group_size, _ = self._norm()
            width = self.weight.in_features
            self._held = decode_weight(packed, *scales, width, group_size, torch.float32)[0]
            self.plain = bool((self._held == 1).all())
        try:
            yield
        finally:
            self._held, self.plain = None, False

    def _norm(self) -> tuple:
        weight = self.weight
        return weight.trits, *weight.scales, weight.group_size, NORM_EPS


class TernaryGate(TernaryRMSNorm):
    """The middle of a gated MLP: silu of the first half times the second, normalised.

    `normalise` False leaves the norm out, and there are no weights. Like a norm, it is part of the
    linear layer behind it.
    """

    def __init__(self, dim: int, config: ModelConfig, *, normalise: bool) -> None:
        nn.Module.__init__(self)
        self.weight = (
            TernaryTensor(1, dim, config, area="norms", frozen=True) if normalise else None
        )
        self._held: Tensor | None = None
        self.plain = False

    @torch.no_grad()
    def forward(self, gate_up: Tensor) -> Tensor:
        """Turn (..., 2 D) into (..., D); not differentiable."""
        return gated_rms_norm(gate_up, *self._norm(), self._held)

    @torch.no_grad()
    def rounded(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Turn (M, 2 D) into (M, D), and round rows to e4m3; not differentiable."""
        return gated_rms_norm_e4m3(gate_up, *self._norm())

    def backward(self, grad_y: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of gate_up, and the result again."""
        return gated_rms_norm_backward(grad_y, gate_up, *self._norm())

    def _norm(self) -> tuple:
        return super()._norm() if self.weight else (None, None, None, 1, NORM_EPS)

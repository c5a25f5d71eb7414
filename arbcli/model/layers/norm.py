"""RMS norms, and gates of MLPs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.config.layer_spec import NORM_EPS as NORM_EPS
from arbcli.config.layer_spec import LayerSpec
from arbcli.kernels.norm.gated_rms_norm import (
    gated_rms_norm,
    gated_rms_norm_backward,
    packed_gates_backward,
)
from arbcli.kernels.norm.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from arbcli.model.layers.compiled import Findable
from arbcli.model.packed import TernaryTensor

LIMIT = 10.0
"""Clamping limit of the inputs of a `ClampedGate`."""


def unit_rms(x: Tensor) -> Tensor:
    """Normalise the last dimension of (..., D) to unit RMS, in its dtype; differentiable."""
    return functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS)


_NO_NORM = torch.zeros(1, device="cpu")


class PackedGates(NamedTuple):
    """Gate and up of an MLP in 12 bits per number: see `pack_gates`."""

    codes: Tensor
    bases: Tensor


def frozen_ones(dim: int, spec: LayerSpec) -> TernaryTensor:
    """Create the weights of a norm, one row, which are initialised to 1."""
    return TernaryTensor(1, dim, spec, area="norms", frozen=True)


class TernaryRMSNorm(Findable):
    """RMS norm whose frozen ternary weights are all 1, and are never read.

    The linear layer after the norm runs it and its backward: see `TernaryLinear`.
    """

    def __init__(self, dim: int, spec: LayerSpec) -> None:
        super().__init__()
        self.weight = frozen_ones(dim, spec)

    @property
    def key_tensor(self) -> Tensor:
        """The trits of the weights, (1, row_bytes(D)) uint8."""
        return self.weight.trits

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D); not differentiable."""
        return rms_norm(x, *self._norm())

    @torch.no_grad()
    def add_and_norm(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, (..., D), and its norm of the same shape; not differentiable."""
        return add_rms_norm(x, added, *self._norm())

    trained = False
    """Whether the norm has trained weights, which need a backward."""
    packs = False
    """Whether the inputs of a gate are packed for the backward pass: see `PackedGates`."""

    def await_backward(self) -> None:
        """Do nothing; norms with trained weights register the use."""

    def backward(
        self, grad_y: Tensor, x: Tensor, other_grad: Tensor | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x plus `other_grad`, and recompute the output: (M, D) each."""
        return rms_norm_backward(grad_y, x, *self._norm(), other_grad)

    def _norm(self) -> tuple[Tensor | None, float]:
        """Return gains and eps for kernels; None for weights that are all 1."""
        return None, NORM_EPS


class TernaryGate(TernaryRMSNorm):
    """silu(gate) * up of a gated MLP, with an RMS norm.

    Without `normalise` there are no norm and no weights. The linear layer after the gate runs it
    and its backward.
    """

    def __init__(self, dim: int, spec: LayerSpec, *, normalise: bool) -> None:
        Findable.__init__(self)
        self.weight = frozen_ones(dim, spec) if normalise else None  # type: ignore[assignment]

    @property
    def key_tensor(self) -> Tensor:
        """The trits of the weights, (1, row_bytes(D)) uint8.

        Gates without a norm share a tensor of shape (1,), as all are equal.
        """
        return self.weight.trits if self.weight else _NO_NORM

    @torch.no_grad()
    def forward(self, gate_up: Tensor) -> Tensor:
        """Compute (..., D) from gate and up, the halves of (..., 2 D); not differentiable."""
        return gated_rms_norm(gate_up, self._eps)

    def backward(
        self,
        grad_y: Tensor,
        x: Tensor | PackedGates,
        other_grad: Tensor | None = None,
        overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, (M, 2 D), and recompute the output, (M, D).

        With `overwrite`, these may take the memory of x and of `grad_y`.

        Raises:
            ValueError: `other_grad` is given, which is not supported.
        """
        if other_grad is not None:
            raise ValueError("a gate's input has no other gradient to add")
        if isinstance(x, PackedGates):
            return packed_gates_backward(grad_y, *x, self._eps, overwrite)
        return gated_rms_norm_backward(grad_y, x, self._eps, overwrite)

    @property
    def _eps(self) -> float | None:
        """The eps of the norm; None if there is none."""
        return NORM_EPS if self.weight else None


class ClampedGate(TernaryGate):
    """A `TernaryGate` with gate clamped to at most `LIMIT`, and up to -`LIMIT`..`LIMIT`."""

    @torch.no_grad()
    def forward(self, gate_up: Tensor) -> Tensor:
        """Compute (..., D) from gate and up, the halves of (..., 2 D); not differentiable."""
        return super().forward(clamp_halves(gate_up))

    def backward(
        self,
        grad_y: Tensor,
        x: Tensor | PackedGates,
        other_grad: Tensor | None = None,
        overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, (M, 2 D), and recompute the output, (M, D)."""
        assert isinstance(x, Tensor), "clamped gates are not packed"
        clamped = clamp_halves(x)
        grad, y = super().backward(grad_y, clamped, other_grad)
        return grad * (clamped == x), y


def clamp_halves(gate_up: Tensor) -> Tensor:
    """Clamp the first half of (..., 2 D) to at most `LIMIT`, and the second to +-`LIMIT`."""
    clamped = gate_up.clamp(max=LIMIT)
    clamped[..., gate_up.shape[-1] // 2 :].clamp_(min=-LIMIT)
    return clamped

"""Root-mean-square norms with packed weights, and the middle of a gated MLP."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from arbcli.config.site import NORM_EPS as NORM_EPS
from arbcli.config.site import Site
from arbcli.kernels.codec.decode_digits import decode_digits_torch
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.norm.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
from arbcli.kernels.norm.norm_e4m3 import (
    add_rms_norm_e4m3,
    gated_rms_norm_e4m3,
    rms_norm_e4m3,
)
from arbcli.kernels.norm.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from arbcli.model.layers.compiled import Findable
from arbcli.model.packed import TernaryTensor

LIMIT = 10.0
"""Bound of the inputs of a `ClampedGate`."""


_NO_NORM = torch.zeros(1, device="cpu")


class NormWeight(TernaryTensor):
    """The frozen weights of a norm, one row, which knows when they are all ones.

    That is found out where they are set, never in a forward, which must not wait for the device.
    """

    def __init__(self, dim: int, site: Site) -> None:
        super().__init__(1, dim, site, area="norms", frozen=True)
        self._versions_of_ones: list[int] | None = None
        self.register_load_state_dict_post_hook(_find_ones)

    def fill(self, trit: int = 1) -> None:
        """Set every weight to `trit`."""
        super().fill(trit)
        self._versions_of_ones = self._versions() if trit == 1 else None

    def find_ones(self) -> None:
        """Look whether all weights are ones; waits for the device."""
        ones = bool((decode_digits_torch(self.packed, torch.float32) == 1).all())
        self._versions_of_ones = self._versions() if ones else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or copy the buffers, whose values stay; those of a move count no changes."""
        ones = self.are_ones
        super()._apply(fn, recurse)
        self._versions_of_ones = self._versions() if ones else None
        return self

    @property
    def are_ones(self) -> bool:
        """Whether all weights are known to be ones: nothing has changed them since."""
        return self._versions_of_ones == self._versions()

    def _versions(self) -> list[int]:
        """Count the changes in place of each buffer, as torch does."""
        return [buffer._version for buffer in self._buffers.values() if buffer is not None]


def _find_ones(weight: NormWeight, _incompatible_keys: Any) -> None:
    weight.find_ones()


class TernaryRMSNorm(Findable):
    """Divide by the root-mean-square, then multiply by frozen ternary weights, all ones.

    A norm is part of the linear layer after it, which differentiates it: see `TernaryLinear`.
    """

    def __init__(self, dim: int, site: Site) -> None:
        super().__init__()
        self.weight = NormWeight(dim, site)

    @property
    def found_by(self) -> Tensor:
        """The trits of the weights."""
        return self.weight.trits

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D); not differentiable."""
        return rms_norm(x, *self._norm())

    @torch.no_grad()
    def of_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, and that normalised; not differentiable."""
        return add_rms_norm(x, added, *self._norm())

    @torch.no_grad()
    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise (M, D), and round rows to e4m3: numbers and scales; not differentiable."""
        return rms_norm_e4m3(x, *self._norm())

    @torch.no_grad()
    def rounded_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x + added, (M, D), and what `rounded` makes of that; not differentiable."""
        return add_rms_norm_e4m3(x, added, *self._norm())

    trained = False
    """Whether a backward is needed for weights, too."""

    def await_backward(self) -> None:
        """Do nothing: a use whose backward will come counts where weights are trained."""

    def backward(
        self, grad_y: Tensor, x: Tensor, other_grad: Tensor | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, plus another one that it has, and the result again."""
        return rms_norm_backward(grad_y, x, *self._norm(), other_grad)

    @property
    def plain(self) -> bool:
        """Whether there are no weights to multiply by, or they are known to be ones."""
        return self.weight.are_ones

    def _norm(self) -> tuple[Packed | None, float]:
        """Give what kernels take for weights and eps; weights of ones are not even decoded."""
        return None if self.plain else self.weight.packed, NORM_EPS


class TernaryGate(TernaryRMSNorm):
    """The middle of a gated MLP: silu of the first half times the second, normalised.

    `normalise` False leaves the norm out, and there are no weights. Like a norm, it is part of the
    linear layer after it.
    """

    def __init__(self, dim: int, site: Site, *, normalise: bool) -> None:
        Findable.__init__(self)
        self.weight = NormWeight(dim, site) if normalise else None  # type: ignore[assignment]

    @property
    def found_by(self) -> Tensor:
        """The trits of the weights; of gates without a norm any is found, all of them are equal."""
        return self.weight.trits if self.weight else _NO_NORM

    @torch.no_grad()
    def forward(self, gate_up: Tensor) -> Tensor:
        """Turn (..., 2 D) into (..., D); not differentiable."""
        return gated_rms_norm(gate_up, *self._norm_of_gate())

    @torch.no_grad()
    def rounded(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Turn (M, 2 D) into (M, D), and round rows to e4m3; not differentiable."""
        return gated_rms_norm_e4m3(gate_up, *self._norm_of_gate())

    def backward(
        self, grad_y: Tensor, x: Tensor, other_grad: Tensor | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, in its place where it may be, and the result again.

        Raises:
            ValueError: x has another gradient, which nothing adds.
        """
        if other_grad is not None:
            raise ValueError("a gate's input has no other gradient to add")
        return gated_rms_norm_backward(grad_y, x, *self._norm_of_gate(), overwrite)

    @property
    def plain(self) -> bool:
        """Whether there are no weights to multiply by, or they are known to be ones."""
        return self.weight is None or super().plain

    def _norm_of_gate(self) -> tuple[Packed | None, float | None]:
        return self._norm() if self.weight else (None, None)


class ClampedGate(TernaryGate):
    """A `TernaryGate` whose first half is at most `LIMIT`, and whose second half is within it."""

    @torch.no_grad()
    def forward(self, gate_up: Tensor) -> Tensor:
        """Turn (..., 2 D) into (..., D); not differentiable."""
        return super().forward(clamp_halves(gate_up))

    @torch.no_grad()
    def rounded(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Turn (M, 2 D) into (M, D), and round rows to e4m3; not differentiable."""
        return super().rounded(clamp_halves(gate_up))

    def backward(
        self, grad_y: Tensor, x: Tensor, other_grad: Tensor | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, and the result again."""
        clamped = clamp_halves(x)
        grad, y = super().backward(grad_y, clamped, other_grad)
        return grad * (clamped == x), y


def clamp_halves(gate_up: Tensor) -> Tensor:
    """Bring the first half of (..., 2 D) to at most `LIMIT`, and the second within it."""
    clamped = gate_up.clamp(max=LIMIT)
    clamped[..., gate_up.shape[-1] // 2 :].clamp_(min=-LIMIT)
    return clamped

"""The root-mean-square norm whose gains are trained."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from arbcli.config.site import Site
from arbcli.kernels.norm.rms_norm import rms_norm, rms_norm_backward
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.vector import TernaryVector


class GainedRMSNorm(TernaryVector):
    """Divide by the root-mean-square, then multiply by a packed vector, which begins as ones.

    Unlike a `TernaryRMSNorm` it is differentiated by itself, and so what it gives is saved.

    Args:
        dim: D.
        site: where it stands.
    """

    plain = False

    def __init__(self, dim: int, site: Site) -> None:
        super().__init__([1.0] * dim, site, area="norms")
        self.eps = site.norm_eps

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise the last dimension of (..., D); differentiable."""
        return _gained_norm(x, super().forward(), self.eps)


class _GainedNorm(Function):
    """Gains times the normalised input, rounded twice in bf16."""

    @staticmethod
    def forward(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        return rms_norm(x, None, eps).mul_(gain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *saved, ctx.eps = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gain = ctx.saved_tensors
        grad_x, normal = rms_norm_backward(grad_y * gain.to(grad_y.dtype), x, None, ctx.eps)
        product = (grad_y.float() * normal).flatten(0, -2)
        return grad_x, product.sum(dim=0), None


_gained_norm = operator(_GainedNorm)

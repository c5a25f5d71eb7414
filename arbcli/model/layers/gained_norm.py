"""RMS norm with trained gains."""

import torch
from torch import Tensor

from arbcli.config.layer_spec import LayerSpec
from arbcli.kernels.norm.gained_rms_norm import gained_rms_norm_backward
from arbcli.model.layers.compiled import Findable
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.layers.vector import VectorWeight


class GainedRMSNorm(TernaryRMSNorm):
    """RMS norm with a packed vector of gains, initially 1.

    Args:
        dim: D.
        spec: storage settings and width of the stage.
    """

    weight: VectorWeight

    def __init__(self, dim: int, spec: LayerSpec) -> None:
        Findable.__init__(self)
        self.weight = VectorWeight([1.0] * dim, spec, area="norms")
        self.eps = spec.norm_eps

    @property
    def key_tensor(self) -> Tensor:
        """Exponents of the scales, (D, 1) int8, as the trits identify the vector."""
        return self.weight.exponent

    trained = True

    def await_backward(self) -> None:
        """Register a use whose backward will run."""
        self.weight.await_backward()

    def backward(
        self, grad_y: Tensor, x: Tensor, other_grad: Tensor | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x plus `other_grad`, and recompute the output: (M, D) each.

        The gradient of the gains goes to the sink.
        """
        grad_x, y, grad = gained_rms_norm_backward(grad_y, x, *self._norm(), other_grad)
        self.weight.collect(None, grad)
        return grad_x, y

    def _norm(self) -> tuple[Tensor, float]:
        return self.weight.weight(torch.float32).flatten(), self.eps

"""Products of many rows in FP8: both operands are rounded to e4m3."""

from torch import Tensor

from arbcli.kernels.matmul.fp8_grad_w import fp8_grad_w
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.products import Product

ROUNDED_GRADIENTS = "mlp"
"""Area of the weights whose gradients are computed in FP8. Those of attention are less accurate in
FP8, as the inputs of its matrices hardly vary in some directions, and take little more time in
bf16."""


class FP8Product(Product):
    """A product in FP8, whose gradient of the weight is not."""

    __slots__ = ()
    name = "fp8"

    def product(self, weight: LinearWeight, x: Tensor) -> Tensor:
        """Compute x @ w.T for (M, K) activations."""
        return fp8_matmul(*quantise_rows(x), weight.packed, dtype=x.dtype)

    def propagate(self, weight: LinearWeight, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        return _propagate(weight, grad_y, *quantise_rows(grad_y))


class FP8BackwardProduct(Product):
    """A product with a backward in FP8: the gradient of x, and in MLPs also of the weight."""

    __slots__ = ()
    name = "fp8-backward"

    def propagate(self, weight: LinearWeight, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        quantised = quantise_rows(grad_y)
        if weight.area == ROUNDED_GRADIENTS:
            weight.quantised_grad = grad_y, *quantised
        return _propagate(weight, grad_y, *quantised)

    def gradient(self, weight: LinearWeight, source: Tensor, grad_y: Tensor) -> Tensor:
        """Compute grad_y.T @ source, the (N, K) gradient of the weight, for (M, K) inputs."""
        if weight.area != ROUNDED_GRADIENTS:
            return super().gradient(weight, source, grad_y)
        saved = weight.quantised_grad
        quantised = saved[1:] if saved and saved[0] is grad_y else quantise_rows(grad_y)
        return fp8_grad_w(*quantised, *quantise_rows(source), source.dtype)


def _propagate(weight: LinearWeight, grad_y: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return fp8_matmul(q, scale, weight.packed, transposed=True, dtype=grad_y.dtype)

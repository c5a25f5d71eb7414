"""Products of many rows in FP8: both operands are rounded to e4m3."""

from torch import Tensor

from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.products import Product


class FP8Product(Product):
    """A product in FP8."""

    __slots__ = ()
    name = "fp8"

    def product(self, weight: LinearWeight, x: Tensor) -> Tensor:
        """Compute x @ w.T for (M, K) activations."""
        return fp8_matmul(*quantise_rows(x), weight.packed, dtype=x.dtype)

    def propagate(self, weight: LinearWeight, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        q, scale = quantise_rows(grad_y)
        return fp8_matmul(q, scale, weight.packed, transposed=True, dtype=grad_y.dtype)

"""Products with packed weights in NVFP4, emulated."""

from torch import Tensor

from arbcli.families.nvfp4.kernels.round_nvfp4 import round_nvfp4 as round_nvfp4
from arbcli.families.nvfp4.kernels.round_nvfp4 import round_stack_nvfp4 as round_stack_nvfp4
from arbcli.families.nvfp4.kernels.scaled_nvfp4 import nvfp4_product
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.products import Product


class NVFP4Product(Product):
    """A product of many rows in NVFP4, emulated."""

    __slots__ = ()
    name = "nvfp4"

    def product(self, weight: LinearWeight, x: Tensor) -> Tensor:
        """Compute x @ w.T for (M, K) activations."""
        return nvfp4_product(x, weight.packed)

    def propagate(self, weight: LinearWeight, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        return nvfp4_product(grad_y, weight.packed, transposed=True)

"""Products with packed weights in NVFP4, emulated."""

from torch import Tensor

from arbcli.families.nvfp4.kernels.round_nvfp4 import round_nvfp4 as round_nvfp4
from arbcli.families.nvfp4.kernels.round_nvfp4 import round_stack_nvfp4 as round_stack_nvfp4
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.products import Product


class NVFP4Product(Product):
    """A product of many rows in NVFP4, of the same numbers in the dtype of the rows.

    The weight is quantised along the summed dimension. Trits are exact, except for the fractions of
    their scales; groups of T16 are the blocks of NVFP4.
    """

    __slots__ = ()
    name = "nvfp4"

    def product(self, weight: LinearWeight, x: Tensor) -> Tensor:
        """Compute x @ w.T for (M, K) activations."""
        return _multiply(x, decode_weight(weight.packed, x.dtype))

    def propagate(self, weight: LinearWeight, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        return _multiply(grad_y, decode_weight(weight.packed, grad_y.dtype).T)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight.T of rounded rows; NaN if an element of x is not finite."""
    (q, scale), (w, weight_scale) = round_nvfp4(x), round_nvfp4(weight)
    return ((q @ w.T).float() * (scale * weight_scale)).to(x.dtype)

"""Products of many rows in FP8: both operands are rounded to e4m3."""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_e4m3 import largest_exponents
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.layers.products import Product


class FP8Product(Product):
    """A product in FP8; the norm before it rounds its result in the same kernel."""

    __slots__ = ()
    name = "fp8"

    def multiply(self, weight: LinearWeight, x: Tensor, before: TernaryRMSNorm | None) -> Tensor:
        """Compute before(x) @ w.T for (M, K) activations."""
        rounded = before.rounded(x) if before else quantise_rows(x)
        return _multiply_rounded(weight, *rounded, x.dtype)

    def multiply_sum(
        self, weight: LinearWeight, x: Tensor, added: Tensor, before: TernaryRMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Compute total = x + added; return before(total) @ w.T and total."""
        total, q, scale = before.rounded_sum(x, added)
        return _multiply_rounded(weight, q, scale, x.dtype), total

    def propagate(self, weight: LinearWeight, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        q, scale = quantise_rows(grad_y)
        return fp8_matmul(
            q,
            scale,
            weight.packed,
            transposed=True,
            dtype=grad_y.dtype,
            largest=weight.take_ready(),
        )


def _multiply_rounded(weight: LinearWeight, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply codes, and save the largest exponents for the next backward.

    Each forward computes them anew, so that captured graphs do too.
    """
    largest = largest_exponents(weight.packed)
    weight.make_ready(largest)
    return fp8_matmul(q, scale, weight.packed, dtype=dtype, largest=largest)

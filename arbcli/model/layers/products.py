"""The choice of a product of a packed matrix, by its storage, the rows, and the backend.

A choice is an immutable object, which shows its conditions and runs the product:

    >>> print(layer.weight.product_for(x))
    fp8: many rows of bfloat16 by trits, on triton
    >>> print(layer.fused_product_for(x))
    row_matmul: 1 rows of one text by trits, prepacked, on triton

Its module is imported when it is chosen for the first time, and later choices are looked up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from arbcli.base.lazy import imported
from arbcli.families import FOUR_BIT_PRODUCTS
from arbcli.kernels.matmul.ternary_matmul import ternary_matmul, ternary_matmul_grad_x
from arbcli.kernels.runtime.arguments import dtype_name

if TYPE_CHECKING:
    from arbcli.model.layers.linear import LinearWeight

FEW_ROWS = 64
"""Largest number of rows of a product that is neither rounded to FP8 or NVFP4 nor decoded in a
group."""
FORMATS = {
    "fp8": "arbcli.model.layers.fp8_product:FP8Product",
    "fp8-backward": "arbcli.model.layers.fp8_product:FP8BackwardProduct",
    "nvfp4": f"{FOUR_BIT_PRODUCTS}:NVFP4Product",
}
"""Places of products of many rows with rounded operands, by their format: see `--compute`."""


class LowPrecision:
    """A module that can multiply in FP8 or in NVFP4."""

    def multiply_in(self, number_format: str) -> bool:
        """Multiply in a format from now on, if the module's shapes allow it.

        Args:
            number_format: a key of `FORMATS`.

        Returns:
            Whether the module has matrices that it multiplies in the format.
        """
        raise NotImplementedError


def fits_low_precision(rows: int, columns: int) -> bool:
    """Return whether both sizes of a matrix are multiples of `MULTIPLE`."""
    from arbcli.kernels.matmul.fp8_matmul import MULTIPLE

    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class Product:
    """A product of rows and a packed matrix, which is decoded for each product."""

    name: ClassVar[str] = "decoded"
    storage: str
    """`trits`, or `int8` for weights with a remainder."""
    many: bool
    """Whether there are more than `FEW_ROWS` rows."""
    dtype: torch.dtype
    """Dtype of rows and results."""
    backend: str
    """`triton`, `native` or `torch`."""

    def __str__(self) -> str:
        """Name the product, and the conditions of its choice."""
        rows = f"{'many' if self.many else 'few'} rows of {dtype_name(self.dtype)}"
        return f"{self.name}: {rows} by {self.storage}, on {self.backend}"

    def product(self, weight: "LinearWeight", x: Tensor) -> Tensor:
        """Compute x @ w.T for (M, K) activations."""
        return ternary_matmul(x, weight.packed)

    def propagate(self, weight: "LinearWeight", grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        return ternary_matmul_grad_x(grad_y, weight.packed)

    def gradient(self, weight: "LinearWeight", source: Tensor, grad_y: Tensor) -> Tensor:
        """Compute grad_y.T @ source, the (N, K) gradient of the weight, for (M, K) inputs."""
        return grad_y.T @ source


class KeptProduct(Product):
    """A product with a matrix that stays decoded: see `LinearWeight.decoded_once`."""

    __slots__ = ()
    name = "kept"

    def product(self, weight: "LinearWeight", x: Tensor) -> Tensor:
        """Compute x @ w.T for (M, K) activations."""
        return x @ weight.kept(x.dtype).T


@cache
def choose_product(
    storage: str, many: bool, dtype: torch.dtype, backend: str,
    number_format: str, grouped: bool, kept: bool,
) -> Product:  # fmt: skip
    """Choose the product of a matrix.

    Args:
        storage: `trits` or `int8`.
        many: whether there are more than `FEW_ROWS` rows.
        dtype: dtype of the rows.
        backend: see `arbcli.kernels.runtime.backend.backend_of`.
        number_format: format of products of many rows: a key of `FORMATS`, or `bf16`.
        grouped: whether a launch decodes several matrices, with this one among them.
        kept: whether backends other than `triton` keep the decoded matrix.
    """
    kind: type[Product] = Product
    if many and number_format in FORMATS:
        kind = imported(FORMATS[number_format])
    elif many and grouped and backend == "triton":
        kind = imported("arbcli.model.layers.group_product:GroupProduct")
    elif kept and backend != "triton":
        kind = KeptProduct
    return kind(storage, many, dtype, backend)


@dataclass(frozen=True, slots=True)
class FusedProduct:
    """A product of few rows and a prepacked matrix, fused with norm, gate and sum."""

    name: str
    storage: str
    """`trits` or `int8`."""
    rows: int
    one_text: bool
    """Whether all rows are positions of one text."""
    backend: str
    run: Callable[..., Tensor]
    """Function of rows, the prepacked matrix, eps or None, and the residual or None."""

    def __str__(self) -> str:
        """Name the product, and the conditions of its choice."""
        rows = f"{self.rows} rows of {'one text' if self.one_text else 'several texts'}"
        return f"{self.name}: {rows} by {self.storage}, prepacked, on {self.backend}"

    def __call__(
        self, rows: Any, weight: Any, eps: float | None, added: Tensor | None, early: bool
    ) -> Tensor:
        """Multiply rows, and add a residual.

        Args:
            rows: (M, K) activations, or partial attention results for `row_matmul`.
            weight: prepacked matrix, see `choose_prepacking`.
            eps: epsilon of the RMS norm of rows; None for no norm.
            added: (M, N) residual; None for none.
            early: whether the next kernel may start early, for `row_matmul`: see `overlap`.

        Returns:
            (M, N).
        """
        if self.name == "row_matmul":
            return self.run(rows, weight, eps, added, early=early)
        return self.run(rows, weight, eps, added)


def fits_row_matmul(storage: str, in_features: int) -> bool:
    """Return whether `row_matmul` multiplies rows of one text by a matrix."""
    from arbcli.kernels.matmul.prepacked import MAX_COLUMNS

    return storage == "trits" and in_features <= MAX_COLUMNS


@lru_cache(256)
def choose_fused(
    storage: str, in_features: int, rows: int, one_text: bool, backend: str
) -> FusedProduct:
    """Choose the product of a decoding step.

    A single text has the fastest kernel for one row, and up to 8 of its positions have the same
    bits as one by one. In a batch, the bits of a text do not depend on the others. One native loop
    does both.
    """
    from arbcli.kernels.matmul.swizzled import MAX_ROWS

    if storage == "int8":
        name = "int8_matmul"
        run = imported("arbcli.kernels.matmul.int8_matmul:int8_matmul")
    elif backend == "native":
        name, run = "prepacked", imported("arbcli.kernels.matmul.prepacked:multiply_on_cpu")
    elif one_text and rows <= MAX_ROWS and fits_row_matmul(storage, in_features):
        name, run = "row_matmul", imported("arbcli.kernels.matmul.row_matmul:row_matmul")
    else:
        name = "prepacked_rows"
        run = imported("arbcli.kernels.matmul.prepacked_rows:prepacked_rows")
    return FusedProduct(name, storage, rows, one_text, backend, run)


def choose_prepacking(storage: str, backend: str) -> Callable[..., Any]:
    """Choose the function of a packed matrix, and whether it is gated, that prepacks it."""
    if storage == "trits":
        return imported("arbcli.kernels.matmul.prepacked:prepack")
    name = "prepack_in_lanes" if backend == "native" else "prepack_int8"
    return imported(f"arbcli.kernels.matmul.int8_matmul:{name}")

"""Interface of directions: their state, and the conversion of a gradient to a step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.update.gradient_gains import GradientGains
from arbcli.kernels.update.unit_gain import unit_gain

State = dict[str, Tensor]
"""Buffers of a matrix by name: `trits`, `exponent`, and those of its rule and direction."""


class Buffer(NamedTuple):
    """Declaration of an int8 buffer of a rule or a direction for a matrix."""

    shape: tuple[int, int]
    kind: str
    """Name of the buffer's purpose in reports."""


class FactoredUpdate(NamedTuple):
    """Factors of a direction u = values * row_gain * column_gain, which kernels multiply."""

    values: Tensor
    """(N, K) float32 or bfloat16."""
    row_gain: Tensor | None
    """(N,) float32, in units of 2**-16; None for the sign of the values."""
    column_gain: Tensor | None
    """(K,) float32; None for ones."""


class Direction:
    """Conversion of a gradient to a direction of unit root-mean-square over its matrix."""

    reads_moment: bool = False
    """Whether the direction is computed from the running mean of gradients, rather than averaged
    over steps itself."""
    keeps_statistics: bool = False
    """Whether the direction has running mean squares of rows and columns, in the buffers
    `row_statistic` and `column_statistic`."""

    def buffers(self, rows: int, columns: int, matrices: int) -> dict[str, Buffer]:
        """Return declarations of the direction's buffers by name, for stacked matrices.

        Args:
            rows: N, number of rows of all matrices together.
            columns: K, number of columns.
            matrices: number of matrices.
        """
        return {}

    def start(self, state: State) -> None:
        """Initialise the direction's buffers, which are zero before."""

    def values(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the direction before its gains, for a gradient (N, K) or a stack (B, N, K).

        Args:
            grad: float32 or bfloat16; or an int8 moment, for a direction that `reads_moment`.
            dtype: dtype of matrix products.
        """
        return grad

    def values_of(
        self, grads: list[Tensor], dtype: torch.dtype, squares: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Return `values` for gradients or moments of several matrices.

        Args:
            grads: gradients or moments, see `values`.
            dtype: dtype of matrix products.
            squares: sums of squares of the moments, int64 scalar tensors.
        """
        return [self.values(grad, dtype) for grad in grads]

    def factors(self, values: Tensor, gains: GradientGains, share: Tensor | None) -> FactoredUpdate:
        """Return the direction as values, (N, K), with gains of rows and columns.

        Args:
            values: result of `values`, (N, K).
            gains: gains from the running mean squares.
            share: share of the rows with a gradient, a float32 scalar tensor; other rows are zero.
                None is 1.
        """
        rows, columns = (gain if gain.numel() else None for gain in (gains.rows, gains.columns))
        unit = unit_gain(values, rows, columns, gains.ok)
        return FactoredUpdate(values, unit if share is None else unit * share.sqrt(), columns)


def transform(
    pairs: Sequence[tuple[Direction | None, Tensor]],
    dtype: torch.dtype,
    squares: list[Tensor] | None = None,
) -> list[Tensor]:
    """Transform matrices by their directions, those of the same direction together.

    Args:
        pairs: directions and (N, K) gradients or moments, see `Direction.values`; without a
            direction, these are unchanged.
        dtype: dtype of matrix products.
        squares: sums of squares of the matrices, int64 scalar tensors, if they are moments.

    Returns:
        (N, K) of each matrix, in order.
    """
    values = [matrix for _, matrix in pairs]
    for direction in dict.fromkeys(direction for direction, _ in pairs if direction is not None):
        indices = [i for i, (other, _) in enumerate(pairs) if other is direction]
        sums = None if squares is None else [squares[i] for i in indices]
        transformed = direction.values_of([pairs[i][1] for i in indices], dtype, sums)
        for i, part in zip(indices, transformed, strict=True):
            values[i] = part
    return values

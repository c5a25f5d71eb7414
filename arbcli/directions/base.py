"""Interface of directions: their state, and how a gradient becomes a step."""

from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.update.gradient_gains import GradientGains
from arbcli.kernels.update.unit_gain import unit_gain

State = dict[str, Tensor]
"""The buffers of one matrix by name: `trits`, `exponent`, and what rule and direction declare."""


class Buffer(NamedTuple):
    """A buffer that a rule or a direction keeps for a matrix, int8."""

    shape: tuple[int, int]
    kind: str
    """Purpose of the bytes, as reports name it."""


class Ingredients(NamedTuple):
    """A direction u = values * row_gain * column_gain, which kernels form where they use it."""

    values: Tensor
    """(N, K) float32 or bfloat16."""
    row_gain: Tensor | None
    """(N,) float32, in units of 2**-16; None for the sign of the values."""
    column_gain: Tensor | None
    """(K,) float32; None for ones."""


class Direction:
    """How a gradient becomes a direction of unit root-mean-square over its matrix."""

    takes_average: bool = False
    """Whether it is better taken of a running mean of gradients than averaged itself."""
    averages: bool = False
    """Whether running mean squares of rows and columns are kept, as `row_statistic` and
    `column_statistic`."""

    def buffers(self, rows: int, columns: int, matrices: int) -> dict[str, Buffer]:
        """Declare what is kept of earlier gradients, for so many matrices one above the other.

        Args:
            rows: N, of all matrices.
            columns: K.
            matrices: how many there are.
        """
        return {}

    def start(self, state: State) -> None:
        """Write the first values of these buffers; they are zero."""

    def values(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Make what gains turn into a direction, of one gradient (N, K) or a stack (B, N, K).

        Args:
            grad: float32 or bfloat16; int8 if it is a moment, of a direction that `takes_average`.
            dtype: of matrix products.
        """
        return grad

    def values_of(
        self, grads: list[Tensor], dtype: torch.dtype, squares: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Do as `values` does, for gradients or for moments of several matrices.

        Args:
            grads: as of `values`.
            dtype: of matrix products.
            squares: int64 scalar tensors, the sum of the squares of each moment.
        """
        return [self.values(grad, dtype) for grad in grads]

    def ingredients(
        self, values: Tensor, gains: GradientGains, share: Tensor | None
    ) -> Ingredients:
        """Find the gains of rows and columns.

        Args:
            values: (N, K), of `values`.
            gains: of the running mean squares.
            share: of the rows, those that take part; the others' gradient is zero. None is all.
        """
        rows, columns = (gain if gain.numel() else None for gain in (gains.rows, gains.columns))
        unit = unit_gain(values, rows, columns, gains.ok)
        return Ingredients(values, unit if share is None else unit * share.sqrt(), columns)

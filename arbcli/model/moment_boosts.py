"""Factors of gradients in moments, for steps of several micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arbcli.kernels.update.moment_squares import moment_squares
from arbcli.model.packed import TernaryTensor
from arbcli.model.step_parameters import BOOST_UNIT

MAX_RATIO = 1 << 16
"""Ratio of squares that is large enough for all numbers of micro-batches."""


class MomentBoosts:
    """Factor of the gradients of a step in the moment of each matrix.

    The average of n gradients of unit RMS has an RMS from 1, if they are equal, to 1 / sqrt(n), if
    they are independent, and rounding to the moment must be small relative to it. The factor is
    r**2, within 1..sqrt(n), for the ratio r of the expected mean square of the moment to its mean
    square before the step. With a decay of 0.9, the moment settles fastest with this exponent.

    Args:
        tensors: the tensors that are stepped.
    """

    def __init__(self, tensors: Sequence[TernaryTensor]) -> None:
        matrices = [(tensor, number) for tensor in tensors for number in range(tensor.matrices)]
        self._averaging = [
            (index, tensor, number)
            for index, (tensor, number) in enumerate(matrices)
            if tensor.rule.moment_range and tensor.steps_once
        ]
        """Matrices whose moments average the gradients of a step, with their indices."""
        squares = [
            round(t.rule.expected_square * t.matrix_rows * t.in_features * BOOST_UNIT)
            for t, _ in matrices
        ]
        device = tensors[0].trits.device
        self._expected = torch.tensor(squares, dtype=torch.int64, device=device)
        """Expected sum of the squares of each moment, in units of 1 / BOOST_UNIT."""
        self.factors = self._expected
        """(matrices,) int64, factors in units of 1 / BOOST_UNIT, after `measure`."""

    @torch.no_grad()
    def measure(self, largest: Tensor) -> None:
        """Compute the factors from the moments before a step.

        Args:
            largest: int32 scalar tensor, the largest factor, in units of 1 / BOOST_UNIT.
        """
        squares = torch.zeros_like(self._expected)
        for index, tensor, number in self._averaging:
            moment = tensor.rule.moment_bytes(tensor.matrix(number))
            moment_squares(moment, squares[index], tensor.rule.share_a_byte)
        ratios = torch.div(self._expected, squares.clamp_(min=1), rounding_mode="floor")
        ratios.clamp_(max=MAX_RATIO)
        boosts = ratios.square_().floor_divide_(BOOST_UNIT).clamp_(min=BOOST_UNIT)
        self.factors = boosts.minimum(largest)

    def multiply(self, gains: Tensor, accumulation: int) -> Tensor:
        """Multiply gains and shifts by the factors.

        Args:
            gains: (matrices, 2) int32.
            accumulation: number of micro-batches in a step.

        Returns:
            (matrices, 2) int32.
        """
        gains, shifts = gains.unbind(1)
        bits = (accumulation - 1).bit_length() + 1 >> 1  # so that gains stay below 1024
        boosted = torch.div(self.factors * gains, BOOST_UNIT << bits, rounding_mode="floor")
        return torch.stack((boosted.to(torch.int32), shifts - bits), dim=1)

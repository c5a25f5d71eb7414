"""Slopes of scales that only certain losses step: see `TrainConfig.scale_losses`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.kernels.update.gradient_statistics import (
    GradientStatistics,
    SignGradient,
    gradient_statistics,
)
from arbcli.model.packed import TernaryTensor

if TYPE_CHECKING:
    from arbcli.kernels.rows.table_rows import TouchedRows


class RoutedSlopes:
    """Slopes from the gradients of certain losses, in place of those from the gradients of all."""

    def __init__(self) -> None:
        self.finding: frozenset[str] = frozenset()
        """Areas whose slopes are being computed; none in normal updates."""
        self._routed: frozenset[str] = frozenset()
        """Areas whose scales are stepped by the computed slopes."""
        self._slopes: dict[int, tuple[Tensor, Tensor]] = {}
        """Computed slopes and their squares, by index of the matrix."""

    @contextmanager
    def find(self, areas: frozenset[str]) -> Iterator[None]:
        """Only compute slopes of areas' scales from the gradients in the block.

        The next gradients of these areas step scales by the computed slopes; scales without one do
        not step.
        """
        self.finding, self._routed = areas, self._routed | areas
        try:
            yield
        finally:
            self.finding = frozenset()

    def keep(
        self,
        tensor: TernaryTensor,
        grad: Tensor | SignGradient,
        index: int,
        where: "range | TouchedRows | None",
    ) -> None:
        """Compute the slopes of a gradient, if `finding` has the area of its tensor.

        Args:
            tensor: as in `Updater`.
            grad: as in `Updater`.
            index: index of the tensor's first matrix.
            where: as in `Updater`.
        """
        if tensor.area not in self.finding:
            return
        if isinstance(grad, SignGradient):
            self._slopes[index] = grad.statistics.slope, grad.statistics.slope_squares
            return
        if isinstance(where, range):
            parts = [(index + n, tensor.matrix(n), grad[i]) for i, n in enumerate(where)]
        else:
            state = tensor.matrix(0) if where is None else tensor.gather(where.rows)
            parts = [(index, state, grad)]
        for number, state, values in parts:
            packed, signs = tensor.packed_of(state), tensor.rule.steps_by_signs
            statistics = gradient_statistics(values, packed, factored=False, signs=signs)
            self._slopes[number] = statistics.slope, statistics.slope_squares

    def replace(
        self, tensor: TernaryTensor, statistics: GradientStatistics, index: int
    ) -> GradientStatistics:
        """Replace the slopes of a routed matrix by the computed ones, or by zero."""
        if tensor.area not in self._routed:
            return statistics
        slope, squares = self._slopes.get(index) or map(torch.zeros_like, statistics[:2])
        return statistics._replace(slope=slope, slope_squares=squares)

    def clear(self) -> None:
        """Discard the slopes of a step."""
        self._slopes.clear()
        self._routed = frozenset()

"""Early stopping: a run ends when its held-out loss has not fallen for some evaluations."""

from collections.abc import Iterable


class Patience:
    """Counts the evaluations since the lowest held-out loss.

    Args:
        limit: number of evaluations without a lower loss after which a run stops; None never stops.
        losses: steps and held-out losses of the evaluations before, in order.
    """

    def __init__(self, limit: int | None, losses: Iterable[tuple[int, float]] = ()) -> None:
        self._limit = limit
        self.best_step, self.best = 0, float("inf")
        """Step and value of the lowest loss."""
        self.last: float | None = None
        """Loss of the last evaluation."""
        self.waited = 0
        """Number of evaluations since the lowest loss."""
        for step, loss in losses:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        """Count an evaluation; a loss that is not finite does not count as lower."""
        self.last, self.waited = loss, self.waited + 1
        if loss < self.best:
            self.best_step, self.best, self.waited = step, loss, 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the run should stop."""
        return self._limit is not None and self.waited >= self._limit

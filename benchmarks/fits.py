"""Fit held-out losses of several sizes and lengths by a law of both, with its errors.

    loss = E + A (weights / 10**6) ** -a + B (bytes / 10**6) ** -b

Source: J. Hoffmann et al., https://arxiv.org/abs/2203.15556. For given exponents the law is linear
in E, A and B, so that only the exponents are searched, first on a coarse grid and then on finer
ones. Squares of relative errors are least. A parameter's standard error is that of the jackknife:
each point is left out once.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

UNIT = 1e6
EXPONENTS = (0.02, 2.0)
"""Least and largest."""
GRID, ROUNDS = 12, 6
FEWEST = 6
"""Points."""


class Law(NamedTuple):
    """The five numbers of a law, or their standard errors."""

    floor: float
    """E, nats a byte."""
    of_size: float
    """A."""
    of_length: float
    """B."""
    size_exponent: float
    """a."""
    length_exponent: float
    """b."""

    def loss(self, weights: float, read: float) -> float:
        """Compute what the law says of a number of weights and bytes read."""
        size = self.of_size * (weights / UNIT) ** -self.size_exponent
        return self.floor + size + self.of_length * (read / UNIT) ** -self.length_exponent


class Fit(NamedTuple):
    """A law, how sure its numbers are, and how well it fits."""

    law: Law
    errors: Law
    """Standard errors."""
    residual: float
    """Root-mean-square of losses over the law, less 1."""
    points: int


def fit(rows: Sequence[dict[str, Any]]) -> Fit | None:
    """Fit rows of `benchmarks.scaling`; None if they are too few."""
    if len(rows) < FEWEST:
        return None
    weights = np.array([row["weights"] / UNIT for row in rows])
    read = np.array([row["bytes"] / UNIT for row in rows])
    loss = np.array([row["held_out_nats"] for row in rows])
    law = _search(weights, read, loss)
    count = len(rows)
    others = [np.arange(count) != left_out for left_out in range(count)]
    parts = np.array([_search(weights[kept], read[kept], loss[kept]) for kept in others])
    spread = ((parts - parts.mean(0)) ** 2).sum(0) * (count - 1) / count
    ratios = law.loss(weights * UNIT, read * UNIT) / loss - 1
    return Fit(law, Law(*np.sqrt(spread)), float(np.sqrt((ratios**2).mean())), count)


def _search(weights: np.ndarray, read: np.ndarray, loss: np.ndarray) -> Law:
    """Find the exponents on a grid that narrows around the best ones."""
    least, most = np.log([EXPONENTS[0]] * 2), np.log([EXPONENTS[1]] * 2)
    for _ in range(ROUNDS):
        grids = [np.exp(np.linspace(*ends, GRID)) for ends in zip(least, most, strict=True)]
        pairs = np.array(list(itertools.product(*grids)))
        numbers, squares = _linear(pairs, weights, read, loss)
        best = int(np.argmin(squares))
        width = (most - least) / (GRID - 1)
        bounds = np.log(EXPONENTS)
        least = np.maximum(np.log(pairs[best]) - 2 * width, bounds[0])
        most = np.minimum(np.log(pairs[best]) + 2 * width, bounds[1])
    return Law(*map(float, numbers[best]), *map(float, pairs[best]))


def _linear(
    pairs: np.ndarray, weights: np.ndarray, read: np.ndarray, loss: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Solve for E, A and B, none below 0, for every pair of exponents, (P, 2).

    Returns:
        (P, 3) numbers, and (P,) sums of squares of relative errors.
    """
    ones = np.ones((len(pairs), len(loss)))
    basis = np.stack([ones, weights ** -pairs[:, :1], read ** -pairs[:, 1:]], axis=2)
    basis = basis / loss[:, None]
    best = np.zeros((len(pairs), 3)), np.full(len(pairs), np.inf)
    for used in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        part = basis[:, :, used]
        normal = part.transpose(0, 2, 1) @ part + 1e-12 * np.eye(len(used))
        found = np.zeros((len(pairs), 3))
        found[:, used] = np.linalg.solve(normal, part.sum(1)[..., None])[..., 0]
        squares = ((np.einsum("pij,pj->pi", basis, found) - 1) ** 2).sum(1)
        better = (found >= 0).all(1) & (squares < best[1])
        best[0][better], best[1][better] = found[better], squares[better]
    return best


def between(rows: Sequence[dict[str, Any]], steps: float) -> float:
    """Find the loss after some steps, on a line through the logarithms of two measured lengths.

    Args:
        rows: of one kind, size and seed.
        steps: at least the fewest that were measured; more than the most count as the most.
    """
    known = sorted((row["steps"], row["held_out_nats"]) for row in rows)
    lengths, losses = np.log(np.array(known)).T
    return float(np.exp(np.interp(np.log(steps), lengths, losses)))

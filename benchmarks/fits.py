"""Fit held-out losses of several sizes and lengths by a law of both, with its errors.

    loss = E + A (weights / 10**6) ** -a + B (bytes / 10**6) ** -b

Source: J. Hoffmann et al., https://arxiv.org/abs/2203.15556. The sum of squares of relative errors
is total_loss. A parameter's standard error is that of the jackknife: each point is left out once.
It is NaN where the remaining points do not determine the parameter, as two sizes do not determine
E, A and a: the minimum is flat there, and only rounding would choose a value.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

UNIT = 1e6
NUMBERS, EXPONENTS = (1e-6, 1e6), (0.02, 2.0)
"""Least and largest E, A and B, at the middle of the points, and exponents."""
FLAT = 1e-6
"""Singular value, relative to the largest, of a direction in which the law does not change."""
STEPS = 2000
"""At most."""
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
    law, _ = _search(weights, read, loss)
    count = len(rows)
    others = [np.arange(count) != left_out for left_out in range(count)]
    searches = (_search(weights[kept], read[kept], loss[kept]) for kept in others)
    parts = np.array([np.where(determined, part, np.nan) for part, determined in searches])
    spread = ((parts - parts.mean(0)) ** 2).sum(0) * (count - 1) / count
    points = zip(weights * UNIT, read * UNIT, strict=True)
    ratios = np.array([law.loss(*point) for point in points]) / loss - 1
    return Fit(law, Law(*np.sqrt(spread)), float(np.sqrt((ratios**2).mean())), count)


def _search(weights: np.ndarray, read: np.ndarray, loss: np.ndarray) -> tuple[Law, np.ndarray]:
    """Minimise by the method of Levenberg and Marquardt, in the logarithms of the parameters.

    Sizes and lengths are centred, and steps are solved for without normal equations, whose
    condition is the square: so the least squares are found to many more digits than are shown.

    Returns:
        the law, and for each of its parameters whether the points determine it.
    """
    size, length = np.log(weights), np.log(read)
    middle = size.mean(), length.mean()
    points = size - middle[0], length - middle[1], loss
    least, most = np.log([NUMBERS] * 3 + [EXPONENTS] * 2).T
    at = np.log([loss.min() / 2, loss.min() / 4, loss.min() / 4, 0.5, 0.5])
    errors, slopes = _linearise(at, *points)
    damping = 0.01
    for _ in range(STEPS):
        system = np.vstack([slopes, damping * np.eye(5)])
        step = np.linalg.lstsq(system, np.append(-errors, np.zeros(5)), rcond=None)[0]
        there = np.clip(at + step, least, most)
        moved = np.abs(there - at).max()
        new_errors, new_slopes = _linearise(there, *points)
        if moved < 1e-10:
            break
        if new_errors @ new_errors < errors @ errors:
            at, errors, slopes, damping = there, new_errors, new_slopes, damping / 2
        else:
            damping *= 2
    _, values, directions = np.linalg.svd(slopes / np.linalg.norm(slopes, axis=0))
    flat = np.append(values, np.zeros(5 - len(values))) < FLAT * values[0]
    determined = (np.abs(directions[flat]) < FLAT).all(0)
    at[1:3] += np.exp(at[3:]) * middle
    return Law(*map(float, np.exp(at))), determined


def _linearise(
    at: np.ndarray, size: np.ndarray, length: np.ndarray, loss: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute relative errors (N,) and their derivatives by the parameters' logarithms (N, 5)."""
    turns = np.exp(at[3]) * size, np.exp(at[4]) * length
    terms = np.stack([np.full_like(loss, at[0]), at[1] - turns[0], at[2] - turns[1]], axis=1)
    terms = np.exp(terms) / loss[:, None]
    slopes = np.column_stack([terms, -turns[0] * terms[:, 1], -turns[1] * terms[:, 2]])
    return terms.sum(1) - 1, slopes


def between(rows: Sequence[dict[str, Any]], steps: float) -> float:
    """Interpolate the loss after some steps between the logarithms of two measured lengths.

    Args:
        rows: of one kind, size and seed.
        steps: at least the fewest that were measured; more than the most count as the most.
    """
    known = sorted((row["steps"], row["held_out_nats"]) for row in rows)
    lengths, losses = np.log(np.array(known)).T
    return float(np.exp(np.interp(np.log(steps), lengths, losses)))

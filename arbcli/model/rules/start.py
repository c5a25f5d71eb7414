"""Initial values of z: quantiles of a normal distribution, rounded and clipped."""

import math
from array import array
from functools import cache

import numpy as np


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


@cache
def quantiles(spread: float, largest: int) -> array:
    """Return clamp(round(spread * n)) at 65536 evenly spaced quantiles of a normal n, as int16."""
    if spread == 0:
        return array("h", bytes(2 * 2**16))
    table = array("h")
    for z in range(-largest, largest + 1):
        share = 1.0 if z == largest else _normal_cdf((z + 0.5) / spread)
        table.extend([z] * (round(share * 2**16) - len(table)))
    return table


@cache
def digit_tables(spread: float, radix: int, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `quantiles` as trits and remainders, int8 each: z = radix * trit + remainder."""
    z = np.frombuffer(quantiles(spread, largest), np.int16)
    trits = (z > radix // 2).astype(np.int16) - (z < -(radix // 2))
    return trits.astype(np.int8), (z - trits * radix).astype(np.int8)


def share_of_nonzero(radix: int, spread: float) -> float:
    """Return the share of nonzero trits for a normal z of standard deviation `spread * radix`."""
    return 2 * _normal_cdf(-(radix // 2 + 0.5) / (spread * radix))


@cache
def root_mean_square(spread: float, largest: int) -> float:
    """Return the RMS of `quantiles`."""
    table = quantiles(spread, largest)
    return math.sqrt(sum(z * z for z in table) / len(table))

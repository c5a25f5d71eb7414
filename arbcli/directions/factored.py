"""`factored`: the gradient over running mean squares of its rows and columns, as in Adafactor.

u = g / sqrt(R[n] * C[k] / mean R), of unit root-mean-square. Source: N. Shazeer and M. Stern,
"Adafactor", https://arxiv.org/abs/1804.04235, algorithm 4.
"""

from arbcli.directions.base import Direction


class Factored(Direction):
    """Each weight by its row's and its column's root-mean-square."""

    averages = True


DIRECTION = Factored()

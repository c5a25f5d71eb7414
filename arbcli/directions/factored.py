"""`factored`: the gradient over running mean squares of its rows and columns, as in Adafactor.

u = g / sqrt(R[n] * C[k] / mean R), of unit root-mean-square. Source: N. Shazeer and M. Stern,
"Adafactor", https://arxiv.org/abs/1804.04235, algorithm 4.
"""

from arbcli.directions.base import Buffer, Direction, State
from arbcli.kernels.update.gradient_gains import UNSET


class Factored(Direction):
    """Each weight by its row's and its column's root-mean-square.

    A running mean square is kept as two int8 digits, whole and 1/128, of its log2.
    """

    averages = True

    def buffers(self, rows: int, columns: int, matrices: int) -> dict[str, Buffer]:
        """Declare (N, 2) for the rows, and (K, 2) for the columns of each matrix."""
        return {
            "row_statistic": Buffer((rows, 2), "statistics"),
            "column_statistic": Buffer((matrices * columns, 2), "statistics"),
        }

    def start(self, state: State) -> None:
        """Nothing has been seen yet."""
        state["row_statistic"][:, 0] = UNSET
        state["column_statistic"][:, 0] = UNSET


DIRECTION = Factored()

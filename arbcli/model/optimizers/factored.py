"""`factored`: the gradient over running mean squares of its rows and columns, as in Adafactor.

u = g / sqrt(R[n] * C[k] / mean R), of unit root-mean-square. Source: N. Shazeer and M. Stern,
"Adafactor", https://arxiv.org/abs/1804.04235, algorithm 4.
"""

from arbcli.kernels.update.gradient_gains import UNSET
from arbcli.model.optimizers.base import Buffer, Direction, State


class Factored(Direction):
    """Gradients divided by the root-mean-squares of their rows and columns.

    log2 of a running mean square is stored as two int8 digits, of units and of 1/128.
    """

    keeps_statistics = True

    def buffers(self, rows: int, columns: int, matrices: int) -> dict[str, Buffer]:
        """Return buffers of (N, 2) for rows, and (K, 2) for columns of each matrix."""
        return {
            "row_statistic": Buffer((rows, 2), "statistics"),
            "column_statistic": Buffer((matrices * columns, 2), "statistics"),
        }

    def start(self, state: State) -> None:
        """Mark all statistics as unset."""
        state["row_statistic"][:, 0] = UNSET
        state["column_statistic"][:, 0] = UNSET


DIRECTION = Factored()

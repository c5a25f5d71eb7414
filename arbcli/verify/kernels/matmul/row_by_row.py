"""Verification of `arbcli.kernels.matmul.row_by_row`."""

from functools import partial

from arbcli.kernels.matmul.row_by_row import (
    ROW_BY_ROW,
)
from arbcli.kernels.matmul.row_matmul import (
    MOST_COLUMNS,
    ROW_MATMUL,
)
from arbcli.kernels.matmul.swizzled import MOST_ROWS
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.matmul import row_matmul as of_row
from arbcli.verify.kernels.matmul.prepacked import (
    draw_prepacked,
    prepacked_cases,
    prepacked_in_float64,
    prepacked_reference,
    prepacked_timings,
)
from arbcli.verify.kernels.matmul.row_matmul import row_matmul_verification
from arbcli.verify.verification import Verification

SHAPES = (
    (2, 34, 1000, 32, True, 1e-6, True), (4, 17, 328, 96, False, 1e-6, True),
    (8, 90, 136, 32, True, None, False), (5, 20, 1288, 32, False, 1e-6, False),
    (1, 1, 8, 32, False, 0.1, False),
)  # fmt: skip
"""(M, rows, K, G, gated, eps, with `added`)."""
TIMED = tuple((4, *shape[1:]) for shape in of_row.TIMED)


def _draw_rows(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    rows = 1 + (m - 1) % MOST_ROWS
    x, *rest = draw_prepacked(rng, group_size, rows, n, min(k, MOST_COLUMNS))
    return (8 * x).round(), *rest


row_by_row_verification = Verification(
    ROW_BY_ROW, prepacked_reference, partial(prepacked_cases, SHAPES), row_matmul_verification.gate,
    draw=_draw_rows, large_reference=prepacked_in_float64, peer=ROW_MATMUL.torch,
    needs_rows=True, timings=partial(prepacked_timings, TIMED),
)  # fmt: skip

"""Verification of `arbcli.kernels.matmul.row_matmul`."""

from arbcli.kernels.matmul.row_matmul import MAX_COLUMNS, ROW_MATMUL
from arbcli.kernels.matmul.swizzled import MAX_ROWS
from arbcli.verify.kernels.matmul import prepacked
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    rows = 1 + (m - 1) % MAX_ROWS
    x, *rest = prepacked.draw_prepacked(rng, group_size, rows, n, min(k, MAX_COLUMNS))
    # integers, exact in 15 bits: with few results, rounding errors could dominate
    return (8 * x).round(), *rest


row_matmul_verification = Verification(
    ROW_MATMUL, prepacked.prepacked_reference, shapes=((1, 34, 1000), (1, 20, 3288), (8, 90, 136)),
    gate=Gate(
        relative=1e-3, peer_slack=0.1,
        reason="x is rounded to 15 bits, 32 elements with one power of two: errors of up to 2**-14"
        " of the largest of them, some 1e-4 of the norm of a product and 3e-4 after a gate; then"
        " float32 sums; in bf16 one rounding, as torch's float32 has"
    ),
    draw=_draw, large_reference=prepacked.prepacked_in_float64,
    library=prepacked.prepacked_by_library, torch_is_peer=True, needs_rows=True,
)  # fmt: skip

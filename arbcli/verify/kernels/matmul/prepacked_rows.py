"""Verification of `arbcli.kernels.matmul.prepacked_rows`."""

from arbcli.kernels.matmul.prepacked_rows import MAX_TEXTS, PREPACKED_ROWS
from arbcli.verify.kernels.matmul import prepacked
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    return prepacked.draw_prepacked(rng, group_size, 1 + (m - 1) % MAX_TEXTS, n, k)


prepacked_rows_verification = Verification(
    PREPACKED_ROWS, prepacked.prepacked_reference, shapes=((9, 34, 328), (3, 20, 1512)),
    gate=Gate(
        relative=1e-3, peer_slack=0.1,
        reason="float32 sums of up to 2600 products, added up by the matrix units; in bf16 one"
        " rounding, as torch's float32 has"
    ),
    draw=_draw, large_reference=prepacked.prepacked_in_float64,
    library=prepacked.prepacked_by_library, torch_is_peer=True, needs_rows=False,
)  # fmt: skip

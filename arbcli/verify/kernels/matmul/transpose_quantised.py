"""Verification of `arbcli.kernels.matmul.transpose_quantised`."""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.kernels.matmul.transpose_quantised import transpose_quantised
from arbcli.verify.kernels.matmul.quantise_rows import (
    codes_to_float32,
    draw_of_any_size,
    quantise_rows_verification,
    round_e4m3_reference,
)
from arbcli.verify.verification import CaseGenerator, Verification, filled


def transpose_quantised_reference(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `transpose_quantised`, with q in float32."""
    shared = scale.amax().view(1, 1)
    values = (q.double() * (scale.double() / shared)).nan_to_num(0)
    transposed = round_e4m3_reference(values).T
    return functional.pad(transposed, (0, -len(q) % MULTIPLE)), shared


def draw_quantised(rng: CaseGenerator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Draw the `quantise_rows` of rows whose magnitudes are up to 20 octaves apart."""
    octaves = torch.tensor([[-rng.integer(21)] for _ in range(rows)], device=rng.device)
    x = draw_of_any_size(rng, rows, columns).float() * torch.exp2(octaves)
    q, scale = quantise_rows_verification.torch(x)
    return q.to(E4M3), scale


def _draw(rng: CaseGenerator, _group_size: int, m: int, _n: int, k: int) -> tuple:
    return draw_quantised(rng, m, k)


transpose_quantised_verification = Verification(
    transpose_quantised, transpose_quantised_reference,
    changed={"zeros": {"q": torch.zeros_like}, "smallest": {"scale": filled(2.0**-126)}},
    compared=codes_to_float32, draw=_draw, needs_rows=True, uses_scales=False,
)  # fmt: skip

"""Verification of `arbcli.families.nvfp4.kernels.scaled_nvfp4`."""

import torch
from torch import Tensor

from arbcli.families.nvfp4.kernels.round_nvfp4 import (
    encode_nvfp4,
    nvfp4_numbers,
)
from arbcli.families.nvfp4.kernels.scaled_nvfp4 import (
    scaled_nvfp4_matmul,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Gate, Verification


def scaled_nvfp4_matmul_reference(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute `scaled_nvfp4_matmul` in float64."""
    rows, columns = (
        nvfp4_numbers(*part, torch.float64) for part in ((a, a_scales), (b, b_scales))
    )  # (M, K), (N, K)
    return rows @ columns.T * scale.double()


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    sides = [encode_nvfp4.torch(rng.reals(rows, k)) for rows in (m, n)]
    (a, a_scales, first), (b, b_scales, second) = sides
    return a, a_scales, b, b_scales, first * second, rng.dtype


scaled_nvfp4_matmul_verification = Verification(
    scaled_nvfp4_matmul, scaled_nvfp4_matmul_reference,
    gate=Gate(relative=4e-3, reason="float32 sums, rounded to bf16"), draw=_draw, needs_rows=True,
    not_verified=("products of hardware of compute capability 10 and more, which was not there",),
)  # fmt: skip

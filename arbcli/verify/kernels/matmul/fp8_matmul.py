"""Verification of `arbcli.kernels.matmul.fp8_matmul`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE, fp8_matmul
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.verify.kernels.codec.decode_e4m3 import decode_e4m3_reference, decode_e4m3_verification
from arbcli.verify.kernels.matmul.quantise_rows import quantise_rows_verification
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def fp8_matmul_reference(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool, dtype: torch.dtype, *,
    decode: Callable = decode_e4m3_reference,
) -> Tensor:  # fmt: skip
    """Compute the reference result of `fp8_matmul`, in float64."""
    weight, weight_scale = decode(packed, transposed)
    return (q.double() * scale) @ (weight.double() * weight_scale.T).T


def _multiply_bf16(
    q: Tensor, _scale: Tensor, packed: Packed, transposed: bool, _dtype: torch.dtype
) -> Callable:
    """Multiply in bfloat16."""
    weight = decode_weight(packed)
    return partial(torch.matmul, q.bfloat16(), weight if transposed else weight.T)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    n, k, transposed = -(-n // MULTIPLE) * MULTIPLE, -(-k // MULTIPLE) * MULTIPLE, rng.integer(2)
    packed = rng.packed(n, k, group_size)
    q, scale = quantise_rows_verification.torch(rng.reals(m, n if transposed else k))
    return q.to(E4M3), scale, packed, transposed == 1, rng.dtype


fp8_matmul_verification = Verification(
    fp8_matmul, fp8_matmul_reference,
    changed={"zeros": {"q": torch.zeros_like}},
    gate=Gate(relative=4e-3, reason="sums of the matrix library, rounded to bf16"), draw=_draw,
    large_reference=partial(fp8_matmul_reference, decode=decode_e4m3_verification.torch),
    needs_rows=True, uses_scales=False, library=_multiply_bf16,
)  # fmt: skip

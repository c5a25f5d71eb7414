"""Verification of `arbcli.kernels.matmul.fp8_matmul`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul.fp8_matmul import (
    MULTIPLE,
    fp8_matmul,
)
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.decode_e4m3 import decode_e4m3_reference, decode_e4m3_verification
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.matmul.quantise_rows import quantise_rows_verification
from arbcli.verify.verification import Gate, Timing, Verification


def fp8_matmul_reference(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool, dtype: torch.dtype, *,
    decode: Callable = decode_e4m3_reference,
) -> Tensor:  # fmt: skip
    """Compute the reference result of `fp8_matmul`, in float64."""
    weight, weight_scale = decode(packed, transposed)
    return (q.double() * scale) @ (weight.double() * weight_scale.T).T


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    rows, outputs, inputs = 8192, 8192, 8192
    packed = random_packed(outputs, inputs, group_size, torch.Generator(device), spread=8)
    dense = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    q, scale = quantise_rows_verification.torch(x)
    for transposed in (False, True):
        yield Timing(
            f"{rows}x{outputs}x{inputs}{' transposed' * transposed}",
            (q.to(E4M3), scale, packed, transposed, torch.bfloat16),
            peer=partial(torch.matmul, x, dense if transposed else dense.T),
            peer_name="cuBLAS bf16",
            flops=2 * rows * outputs * inputs,
        )


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    n, k, transposed = -(-n // MULTIPLE) * MULTIPLE, -(-k // MULTIPLE) * MULTIPLE, rng.below(2)
    packed = rng.packed(n, k, group_size)
    q, scale = quantise_rows_verification.torch(rng.reals(m, n if transposed else k))
    return q.to(E4M3), scale, packed, transposed == 1, rng.dtype


fp8_matmul_verification = Verification(
    fp8_matmul, fp8_matmul_reference,
    changed={"zeros": {"q": torch.zeros_like}},
    gate=Gate(relative=4e-3, reason="sums of the matrix library, rounded to bf16"), draw=_draw,
    large_reference=partial(fp8_matmul_reference, decode=decode_e4m3_verification.torch),
    needs_rows=True, uses_scales=False, timings=_timings,
)  # fmt: skip

"""Products with a packed matrix in FP8: both operands rounded to e4m3, accumulated in float32.

Activations and gradients have one scale per row, weights one per matrix; all are powers of two.
Trits are exact; the fraction of a group's scale is rounded to three bits. cuBLAS multiplies on GPUs
with FP8 (sm_89 or later); on others the same numbers are multiplied in float32.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_e4m3 import (
    LARGEST,
    _decode_e4m3_torch,
    _decode_e4m3_triton,
    decode_e4m3,
    decode_e4m3_reference,
)
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.quantise_rows import E4M3, quantise_rows
from arbcli.kernels.runtime.arguments import FLOAT, Array, Matrix, Number
from arbcli.kernels.runtime.inputs import dtype_name, real_dtypes
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing

MULTIPLE = 16
"""Required divisor of both sizes of a matrix."""


def fp8_matmul_reference(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool, dtype: torch.dtype, *,
    decode: Callable = decode_e4m3_reference,
) -> Tensor:  # fmt: skip
    """Compute the reference result of `fp8_matmul`, in float64."""
    weight, weight_scale = decode(packed, transposed)
    return (q.double() * scale) @ (weight.double() * weight_scale.T).T


def _fp8_matmul_torch(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16, largest: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _multiply(q, scale, *_decode_e4m3_torch(packed, transposed, largest), dtype)


def _fp8_matmul_triton(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16, largest: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _multiply(q, scale, *_decode_e4m3_triton(packed, transposed, largest), dtype)


def _multiply(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    if q.is_cuda and dtype == torch.bfloat16:
        return torch._scaled_mm(
            q, weight.T, scale, weight_scale, out_dtype=dtype, use_fast_accum=True
        )
    return ((q.float() @ weight.float().T) * (scale * weight_scale)).to(dtype)


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in ((65, 32, 48), (3, 16, 176), (5, 48, 336)):
        packed = random_packed(outputs, inputs, group_size, generator, spread=4).to(device)
        for transposed in (False, True):
            width = outputs if transposed else inputs
            source = torch.randn(rows, width, generator=generator).to(device)
            rounded = quantise_rows.torch(source)
            rounded = rounded[0].to(E4M3), rounded[1]
            for dtype in real_dtypes(device):
                label = f"{rows}x{outputs}x{inputs} {dtype_name(dtype)}"
                label += " transposed" * transposed
                yield Case(label, (*rounded, packed, transposed, dtype))
    octaves = packed._replace(fraction=None)
    yield Case(label + " whole octaves", (*rounded, octaves, transposed, dtype))
    zeros = torch.zeros_like(rounded[0])
    yield Case(label + " zeros", (zeros, rounded[1], packed, transposed, dtype))


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    rows, outputs, inputs = 8192, 8192, 8192
    packed = random_packed(outputs, inputs, group_size, torch.Generator(device), spread=8)
    dense = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    q, scale = quantise_rows.torch(x)
    for transposed in (False, True):
        yield Timing(
            f"{rows}x{outputs}x{inputs}{' transposed' * transposed}",
            (q.to(E4M3), scale, packed, transposed, torch.bfloat16),
            peer=partial(torch.matmul, x, dense if transposed else dense.T),
            peer_name="cuBLAS bf16",
            flops=2 * rows * outputs * inputs,
        )


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    n, k, transposed = -(-n // MULTIPLE) * MULTIPLE, -(-k // MULTIPLE) * MULTIPLE, dice.below(2)
    packed = dice.packed(n, k, group_size)
    q, scale = quantise_rows.torch(dice.reals(m, n if transposed else k))
    return q.to(E4M3), scale, packed, transposed == 1, dice.dtype


fp8_matmul = Operation(
    "fp8_matmul", _fp8_matmul_triton, _fp8_matmul_torch, fp8_matmul_reference, _cases,
    Gate(relative=4e-3, reason="sums of the matrix library, rounded to bf16"),
    {
        "q": Array("M, N if transposed else K", (E4M3,)), "scale": Array("M, 1", FLOAT),
        "packed": Matrix(), "transposed": Number((False, True)),
        "dtype": Number((torch.bfloat16, torch.float32)), "largest": LARGEST,
    },
    where=(f"N % {MULTIPLE} == 0 and K % {MULTIPLE} == 0",), draw=_draw, needs_rows=True,
    large_reference=partial(fp8_matmul_reference, decode=decode_e4m3.torch), uses_scales=False,
    timings=_timings,
)  # fmt: skip
"""Multiply activations by a packed matrix, or a gradient by its transpose, in FP8.

y = q * scale @ w.T, or q * scale @ w if `transposed`, with w rounded by `decode_e4m3`

Args:
    q: (M, K) float8_e4m3fn, contiguous; (M, N) if `transposed`.
    scale: (M, 1) float32; `q` and `scale` are results of `quantise_rows`.
    packed: w, N rows by K weights, both multiples of `MULTIPLE`.
    transposed: whether to compute q @ w, for a gradient.
    dtype: dtype of the result, bfloat16 or float32.
    largest: result of `largest_exponents` of the matrix; None computes it.

Returns:
    (M, N) in `dtype`; (M, K) if `transposed`. A row whose scale is NaN gives NaN.
"""

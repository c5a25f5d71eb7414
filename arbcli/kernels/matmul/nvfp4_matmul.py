"""Products with a packed matrix in NVFP4, emulated: both sides rounded, multiplied as bfloat16.

What hardware with four-bit products computes is computed here from the same numbers, with sums in
float32, at the speed of bfloat16 less the rounding. Trits are exact, but for the fractions of their
scales; the groups of T16 are the blocks of a scale.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits_reference, decode_digits_torch
from arbcli.kernels.codec.decode_weight import decode_weight_triton
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.kernels.matmul.round_nvfp4 import BLOCK, round_nvfp4, round_nvfp4_reference
from arbcli.kernels.runtime.arguments import FLOAT, Array, Matrix, Number
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing


def nvfp4_matmul_reference(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """Compute what `nvfp4_matmul` must return, in float64."""
    weight = decode_digits_reference(packed)
    weight, weight_scale = round_nvfp4_reference((weight.T if transposed else weight).float())
    return q.double() @ weight.double().T * (scale.double() * weight_scale.double())


def _nvfp4_matmul_torch(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    return _multiply(q, scale, packed, transposed, dtype, decode_digits_torch, round_nvfp4.torch)


def _nvfp4_matmul_triton(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    return _multiply(q, scale, packed, transposed, dtype, decode_weight_triton, round_nvfp4.triton)


def _multiply(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool, dtype: torch.dtype,
    decode: Callable[[Packed, torch.dtype], Tensor],
    round_rows: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:  # fmt: skip
    weight = decode(packed, q.dtype)
    weight, weight_scale = round_rows(weight.T if transposed else weight)
    return ((q @ weight.T).float() * (scale * weight_scale)).to(dtype)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    # few, and of T16: decoding is verified by itself, and takes the interpreter seconds
    for rows, outputs, inputs, transposed in ((65, 32, 48, False), (5, 16, 176, True)):
        packed = random_packed(outputs, inputs, BLOCK, generator, spread=4).to(device)
        width = outputs if transposed else inputs
        source = torch.randn(rows, width, generator=generator).to(device)
        for dtype in dtypes:
            q, scale = round_nvfp4.torch(source.to(dtype))
            label = f"{rows}x{outputs}x{inputs} {str(dtype).removeprefix('torch.')}"
            label += " transposed" * transposed
            yield Case(label, (q, scale, packed, transposed, dtype))
    yield Case(f"{label} zeros", (torch.zeros_like(q), scale, packed, transposed, dtype))


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    size = 4096
    packed = random_packed(size, size, group_size, torch.Generator(device), spread=8)
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    q, scale = round_nvfp4.torch(x)
    yield Timing(
        f"{size}x{size}x{size}",
        (q, scale, packed, False, torch.bfloat16),
        peer=lambda: x @ x.T,
        peer_name="cuBLAS bf16",
        flops=2 * size**3,
    )


def _in_float64(
    q: Tensor, scale: Tensor, packed: Packed, transposed: bool, _dtype: torch.dtype
) -> Tensor:
    weight = decode_digits_torch(packed, torch.float32)
    weight, weight_scale = round_nvfp4.torch(weight.T if transposed else weight)
    return q.double() @ weight.double().T * (scale.double() * weight_scale.double())


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    n, k, transposed = -(-n // MULTIPLE) * MULTIPLE, -(-k // MULTIPLE) * MULTIPLE, dice.below(2)
    packed = dice.packed(n, k, group_size)
    q, scale = round_nvfp4.torch(dice.reals(m, n if transposed else k))
    return q, scale, packed, transposed == 1, dice.dtype


nvfp4_matmul = Operation(
    "nvfp4_matmul", _nvfp4_matmul_triton, _nvfp4_matmul_torch, nvfp4_matmul_reference, _cases,
    Gate(exact=False, relative=6e-3, reason="sums of the matrix library, twice rounded to bf16"),
    {
        "q": Array("M, N if transposed else K"), "scale": Array("1", FLOAT, dense=True),
        "packed": Matrix(), "transposed": Number((False, True)),
        "dtype": Number((torch.bfloat16, torch.float32)),
    },
    where=(f"N % {MULTIPLE} == 0 and K % {MULTIPLE} == 0",), draw=_draw, needs_rows=True,
    large_reference=_in_float64, uses_scales=False, timings=_timings,
)  # fmt: skip
"""Multiply activations by a packed matrix, or a gradient by its transpose, as in four bits.

y = g * q @ w.T, or g * q @ w if `transposed`, with w rounded by `round_nvfp4` along the sum

Args:
    q: (M, K) float32 or bfloat16, contiguous; (M, N) if `transposed`.
    scale: (1,) float32, g; both as `round_nvfp4` gives them.
    packed: w, N rows by K weights, both multiples of `MULTIPLE`.
    transposed: whether the product is that of a gradient.
    dtype: of the result, bfloat16 or float32.

Returns:
    (M, N) in `dtype`; (M, K) if `transposed`. A scale of NaN gives NaN.
"""

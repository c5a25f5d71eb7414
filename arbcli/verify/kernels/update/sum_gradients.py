"""Verification of `arbcli.kernels.update.sum_gradients`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.update.hadamard import (
    LARGEST_BLOCK,
    block_of,
)
from arbcli.kernels.update.quantise_gradient import NONE, NOT_FINITE
from arbcli.kernels.update.sum_gradients import (
    sum_gradients,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.update.hadamard import hadamard_matrix, signs_reference
from arbcli.verify.kernels.update.quantise_gradient import together_reference
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Verification


def sum_gradients_reference(
    parts: Tensor, low: Tensor | None, exponent: Tensor, fitting: Tensor, block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Compute the reference result of `sum_gradients`, in int64 and float64."""
    total = together_reference(parts, low).sum(0)
    integer: TensorOptions = {"dtype": torch.int64, "device": parts.device}
    if block > 1:
        mixer = torch.tensor(hadamard_matrix(block), **integer)
        blocks = total.reshape(-1, block, 1) * mixer  # a product of integers, on a GPU too
        signs = torch.tensor(signs_reference(total.shape[1]), **integer)
        total = blocks.sum(1).reshape(total.shape) * signs
    values = total.double() / block * torch.exp2(exponent.double())[:, None]
    values = torch.where((exponent == -128)[:, None], 0, values)
    wrong = (fitting == 127).any(dim=0)[:, None]
    return torch.where(wrong, torch.inf, values).to(dtype)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device, dtype)

    for number, rows, columns, limit, dtype in (
        (1, 1, 1, 127, torch.int8), (2, 3, 33, 63, torch.int8), (4, 17, 523, 31, torch.int8),
        (3, 33, 1, 127, torch.int8), (2, 9, 40, 3000, torch.int16), (2, 5, 640, 2, torch.int8),
        (2, 5, 7, 2**20, torch.int32),
    ):  # fmt: skip
        parts = integers(-limit, limit + 1, number, rows, columns, dtype=dtype)
        exponent, fitting = integers(-100, 100, rows), integers(-9, 0, number, rows)
        inputs, block = (parts, None, exponent, fitting), block_of(columns)
        yield Case(f"{number}x{rows}x{columns} {dtype}", (*inputs, block, torch.float32))
        if limit * number * block <= 256:  # exact in bfloat16
            yield Case(f"{number}x{rows}x{columns} {dtype} bf16", (*inputs, block, torch.bfloat16))
    exponent, fitting = exponent.clone(), fitting.clone()
    exponent[1], fitting[1, 2], fitting[0, 3] = NONE, NOT_FINITE, NOT_FINITE
    yield Case("2x5x7 none and not finite", (parts, None, exponent, fitting, 1, torch.float32))
    for number, rows, columns in ((1, 1, 2), (4, 9, 48), (2, 4, 192)):
        parts = integers(-128, 128, number, rows, columns)
        bits = integers(0, 256, number, (rows + 1) // 2, columns, dtype=torch.uint8)
        scales, fit = integers(-9, 9, rows), integers(-9, 0, number, rows)
        twelve = (parts, bits, scales, fit, block_of(columns), torch.float32)
        yield Case(f"{number}x{rows}x{columns} twelve bits", twelve)
    wide, halves = integers(-31, 32, 4, 8 * 40 + 16), integers(0, 256, 4, 176, dtype=torch.uint8)
    apart = integers(-9, 9, 8), integers(-9, 0, 4, 24)[:, :8]
    wide = wide[:, :320].unflatten(1, (8, 40))
    yield Case("4x8x40 with gaps", (wide, None, *apart, 8, torch.float32))
    halves = halves[:, :160].unflatten(1, (4, 40))
    yield Case("4x8x40 twelve bits with gaps", (wide, halves, *apart, 8, torch.float32))
    yield Case("4x8x40 not mixed", (wide, None, *apart, 1, torch.float32))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    number, dtype = 1 + rng.below(4), rng.pick((torch.int8, torch.int16, torch.int32))
    low = None
    if dtype == torch.int8 and rng.chance(0.5):
        halves = rng.integers(-128, 127, number, (n + 1) // 2 * k + rng.below(3))
        low = halves.contiguous().view(torch.uint8)[:, : (n + 1) // 2 * k]
        low = low.unflatten(1, ((n + 1) // 2, k))
    room = torch.zeros(number, n * k + rng.below(3), dtype=dtype, device=rng.device)
    parts = room[:, : n * k].unflatten(1, (n, k))
    parts.copy_(rng.integers(-127, 127, number, n, k))
    exponent, fitting = (rng.integers(-9, 9, *shape).contiguous() for shape in ((n,), (number, n)))
    return parts, low, exponent, fitting, block_of(k) if rng.chance(0.9) else 1


sum_gradients_verification = Verification(
    sum_gradients, sum_gradients_reference, _cases, draw=_draw, needs_rows=False,
    timed=[
        Timed(f"{parts} parts of 11264x2048{', 12 bits' * bool(low)}", P=parts, **MATRIX_SIZES,
              parts=1, low=low, exponent=-4, fitting=-4, block=LARGEST_BLOCK, dtype=torch.bfloat16)
        for parts, low in ((1, None), (4, None), (4, 1))
    ],
)  # fmt: skip

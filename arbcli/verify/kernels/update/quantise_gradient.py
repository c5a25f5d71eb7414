"""Verification of `arbcli.kernels.update.quantise_gradient`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import placed
from arbcli.kernels.update.hadamard import (
    LARGEST_BLOCK,
    block_of,
)
from arbcli.kernels.update.quantise_gradient import (
    NONE,
    quantise_gradient,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.update.hadamard import mixed_reference
from arbcli.verify.kernels.update.random_bits import random_halves_reference
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Verification


def quantise_gradient_reference(
    grad: Tensor, exponent: Tensor, key: Tensor, sums: Tensor, low: Tensor | None, fitting: Tensor,
    limit: int, block: int, add: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the reference result of `quantise_gradient` (`sums`, `low`, `fitting`)."""
    values = mixed_reference(grad.float(), block).double() if block > 1 else grad.double()
    e = exponent.long()[:, None]
    size = torch.where(values.abs() < torch.inf, values.abs(), 0) * torch.exp2(-e.double())
    size = torch.where(e == -128, 0, size.clamp(max=limit))
    parts = torch.floor(size * 65536).long()  # exact: below 2**53
    random = random_halves_reference(int(key), *grad.shape).to(grad.device)
    q = torch.sign(values).nan_to_num(0).long() * ((parts + random) // 65536).clamp(max=limit)
    octaves = []
    for row in values.abs():
        largest = float(row.max()) if bool(torch.isfinite(row).all()) else float("inf")
        fits = torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent.item()
        normal = 2.0**-126 <= largest < float("inf")
        octave = min(max(fits - limit.bit_length(), -100), 100) if normal else -128
        octaves.append(127 if largest == float("inf") else octave)
    new = torch.tensor(octaves, dtype=torch.int8, device=fitting.device)
    exponents = torch.maximum(fitting, new) if add else new
    if low is None:
        return (sums.long() + q if add else q).to(sums.dtype), exponents
    total = together_reference(sums, low) + q if add else q
    bits = torch.cat([total, total.new_zeros(len(total) % 2, total.shape[1])]) % 16
    high = torch.div(total, 16, rounding_mode="floor").to(torch.int8)
    return high, (bits[::2] + 16 * bits[1::2]).to(torch.uint8), exponents


def together_reference(sums: Tensor, low: Tensor | None) -> Tensor:
    """Combine the planes of sums, in int64: (..., N, K)."""
    if low is None:
        return sums.long()
    bits = torch.stack([low.long() % 16, low.long() // 16], dim=-2)
    return 16 * sums.long() + bits.flatten(-3, -2)[..., : sums.shape[-2], :]


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def case(
        label: str, grad: Tensor, limit: int, add: bool, dtype: torch.dtype = torch.int8,
        low: bool = False, block: int | None = None,
    ) -> Case:  # fmt: skip
        rows, columns = grad.shape
        exponent = torch.randint(-8, 2, (rows,), generator=generator).to(torch.int8)
        exponent[::5] = NONE
        sums = torch.randint(-90, 90, grad.shape, generator=generator).to(dtype)
        pairs = None
        if low:
            pairs = torch.randint(256, ((rows + 1) // 2, columns), generator=generator)
            if rows % 2:
                pairs[-1] &= 15
            pairs = pairs.to(torch.uint8)
        fitting = torch.randint(-9, 0, (rows,), generator=generator).to(torch.int8)
        key = torch.tensor(-987654321, dtype=torch.int32)
        arguments = (grad, exponent, key, sums, pairs, fitting)
        tensors = (None if part is None else placed(part, device) for part in arguments)
        return Case(label, (*tensors, limit, block or block_of(columns), add))

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    for rows, columns in ((1, 1), (3, 33), (33, 1), (17, 523)):
        yield case(f"{rows}x{columns}", draw(rows, columns), 127, False)
        yield case(f"{rows}x{columns} added", draw(rows, columns), 31, True)
    for rows, columns in ((3, 2), (5, 48), (9, 40), (4, 640)):
        yield case(f"{rows}x{columns} in blocks", draw(rows, columns), 127, False)
        twelve = partial(case, dtype=torch.int8, low=True)
        yield twelve(f"{rows}x{columns} twelve bits", draw(rows, columns), 2047, False)
        yield twelve(f"{rows}x{columns} twelve bits added", draw(rows, columns), 511, True)
    yield case("9x40 int16 added", draw(9, 40), 63, True, torch.int16)
    yield case("9x40 fifteen bits", draw(9, 40), 32767, False, torch.int16)
    yield case("9x40 int32 added", draw(9, 40), 31, True, torch.int32)
    yield case("9x64 not mixed", draw(9, 64), 31, True, block=1)
    yield case("6x20 strided", draw(12, 60)[::2, ::3], 127, False)
    yield case("5x43 transposed", draw(43, 5).T, 127, True, torch.int16)
    yield case("5x7 zeros", torch.zeros(5, 7), 127, True)
    yield case("6x9 clipped", draw(6, 9) * 1e30, 31, False)
    yield case("6x9 tiny", draw(6, 9) * 1e-33, 127, False)
    wrong = draw(7, 12)
    wrong[1, 3], wrong[2, 0], wrong[3, 11] = torch.nan, torch.inf, -torch.inf
    yield case("7x12 not finite", wrong, 127, False)
    yield case("7x12 not finite, not mixed", wrong, 127, False, block=1)
    halves = torch.arange(-64, 64).float()[None].expand(7, 128) / 16
    yield case("7x128 halfway", halves, 15, False, block=1)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    dtype = rng.pick((torch.int8, torch.int16, torch.int32))
    sums = torch.full((n, k), rng.below(99), dtype=dtype, device=rng.device)
    exponent, fitting = (rng.integers(-9, 1, n).contiguous() for _ in range(2))
    if rng.chance(0.2):
        exponent[:: 1 + rng.below(4)] = NONE
    low, room = None, 29  # in sums of int8
    if dtype == torch.int8 and rng.chance(0.5):
        low, room = rng.integers(0, 15, (n + 1) // 2, k).contiguous().view(torch.uint8), 450
    block = block_of(k) if rng.chance(0.9) else 1
    share = 1 + rng.below(room)
    return rng.reals(n, k), exponent, rng.key(), sums, low, fitting, share, block, True


quantise_gradient_verification = Verification(
    quantise_gradient, quantise_gradient_reference, _cases, compared=("sums", "low", "fitting"),
    draw=_draw, needs_rows=False,
    timed=[
        Timed(f"11264x2048 bf16, {bits} bits{' added' * add}", **MATRIX_SIZES, exponent=-4,
              sums=0, low=low, fitting=-4, limit=limit, block=LARGEST_BLOCK, add=add)
        for add in (False, True) for bits, limit, low in ((8, 31, None), (12, 511, 0))
    ],
)  # fmt: skip

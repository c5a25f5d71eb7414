"""Verification of `arbcli.kernels.update.gradient_statistics`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.update.gradient_statistics import (
    GradientStatistics,
    gradient_statistics,
)
from arbcli.verify.kernels.codec.decode_digits import (
    add_remainders,
    digits_large,
    digits_reference,
    scales_reference,
)
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Gate, Verification


def gradient_statistics_reference(
    grad: Tensor, packed: Packed, factored: bool, signs: bool, *,
    digits: Callable = digits_reference,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the reference result of `gradient_statistics`, in float64 and in one part each."""
    grad = grad.double()
    weight = digits(packed).double() * scales_reference(packed).to(torch.bfloat16).double()
    products = (torch.sign(grad) if signs else grad) * weight
    group_slopes = [group.sum(1) for group in products.split(packed.group_size, dim=1)]
    slope, squares = torch.stack(group_slopes, dim=1), grad * grad
    rows, columns = (squares.sum(dim) * factored for dim in (1, 0))
    return slope, (slope * slope).sum(), squares.sum(), rows, columns


def _scale_path(group_size: int) -> tuple[bool, bool]:
    """Return whether groups are planes, and whether their lanes are all of them."""
    return group_size == PLANE, group_size & (group_size - 1) == 0


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def case(
        label: str, rows: int, columns: int, view: Callable[[Tensor], Tensor] = lambda x: x,
        *flags: bool,
    ) -> Case:  # fmt: skip
        grad = view(torch.randn(rows, columns, generator=generator).to(device))
        rows, columns = grad.shape
        packed = random_packed(rows, columns, group_size, generator, spread=8).to(device)
        return Case(label, (grad, packed, *(flags or (True, False))))

    for rows, columns in ((1, 1), (3, 33), (33, 123), (2, 1311)):
        yield case(f"{rows}x{columns}", rows, columns)
    grad, packed, *flags = case("", 2, 165).inputs
    yield Case("2x165 whole octaves", (grad, packed._replace(fraction=None), *flags))
    yield case("9x40 not factored", 9, 40, lambda x: x, False, False)
    yield case("9x40 signs", 9, 40, lambda x: x * (x > -1), False, True)
    yield case("5x43 strided", 10, 86, lambda x: x[::2, ::2])
    yield case("65x7 transposed", 7, 65, lambda x: x.T)
    yield case("5x7 zeros", 5, 7, torch.zeros_like)
    grad, packed, *flags = case("", 3, 333).inputs
    for name, all_digits in add_remainders(packed, generator):
        yield Case(f"3x333 {name}", (grad, all_digits, *flags))
    if device.type == "cuda":  # the interpreter's bf16 is wrong, and slow
        yield case("2049x2080 bf16", 2049, 2080, lambda x: x.bfloat16())


def _sum_parts(_inputs: tuple, statistics: GradientStatistics) -> tuple[Tensor, ...]:
    """Sum the parts, in float64."""
    slope, *sums, rows, columns = statistics
    sums = [part.double().sum() for part in sums]
    return slope, *sums, *(part.double().sum(0) for part in (rows, columns))


gradient_statistics_verification = Verification(
    gradient_statistics, gradient_statistics_reference, _cases,
    Gate(relative=4e-6, reason="float32 sums of products that cancel in part"),
    compared=_sum_parts,
    large_reference=partial(gradient_statistics_reference, digits=digits_large),
    scale_path=_scale_path,
    timed=[
        Timed(f"11264x2048 bf16{' factored' * factored}", **MATRIX_SIZES, factored=factored)
        for factored in (False, True)
    ],
    values={"factored": (False, True), "signs": (False, False, False, True)},
)  # fmt: skip

"""Verification of `arbcli.kernels.update.gradient_statistics`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.update.gradient_statistics import GradientStatistics, gradient_statistics
from arbcli.verify.kernels.codec.decode_digits import (
    digits_large,
    digits_reference,
    scales_reference,
)
from arbcli.verify.kernels.codec.packed import ALL_DIGITS
from arbcli.verify.verification import Gate, Verification


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
    """Return whether groups are planes, and whether they fill all lanes."""
    return group_size == PLANE, group_size & (group_size - 1) == 0


def _sum_parts(_inputs: tuple, statistics: GradientStatistics) -> tuple[Tensor, ...]:
    """Sum the parts, in float64."""
    slope, *sums, rows, columns = statistics
    sums = [part.double().sum() for part in sums]
    return slope, *sums, *(part.double().sum(0) for part in (rows, columns))


gradient_statistics_verification = Verification(
    gradient_statistics, gradient_statistics_reference,
    changed=ALL_DIGITS | {"zeros": {"grad": torch.zeros_like}},
    gate=Gate(relative=4e-6, reason="float32 sums of products that cancel in part"),
    compared=_sum_parts,
    large_reference=partial(gradient_statistics_reference, digits=digits_large),
    scale_path=_scale_path,
    values={"factored": (False, True), "signs": (False, False, False, True)},
)  # fmt: skip

"""Verification of `arbcli.kernels.update.sign_gradient`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.update.sign_gradient import SignGradient, sign_gradient
from arbcli.verify.kernels.codec.decode_digits import digits_large, digits_reference
from arbcli.verify.kernels.update.gradient_statistics import gradient_statistics_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification, no_rows


def sign_gradient_reference(
    grad_y: Tensor, x: Tensor, packed: Packed, *, digits: Callable = digits_reference
) -> tuple[Tensor, ...]:
    """Compute the reference result of `sign_gradient`, in float64, and sums in one part each."""
    grad = grad_y.double().T @ x.double()
    results = gradient_statistics_reference(grad, packed, False, True, digits=digits)
    return torch.sign(grad).to(torch.int8), *results[:3]


def _scale_path(group_size: int) -> bool:
    """Return whether groups fill all lanes."""
    return group_size & (group_size - 1) == 0


def _sum_parts(_inputs: tuple, results: SignGradient) -> tuple[Tensor, ...]:
    """Sum the parts, in float64."""
    signs, (slope, *sums, _, _) = results
    return signs, slope, *(part.double().sum() for part in sums)


def _draw_small(rng: CaseGenerator, *shape: int) -> Tensor:
    """Draw small integers, whose sums are exact, so that signs do not depend on their order."""
    return rng.view(rng.integers(-4, 4, *shape).to(rng.dtype))


sign_gradient_verification = Verification(
    sign_gradient, sign_gradient_reference,
    changed={"zeros": {"grad_y": torch.zeros_like}, "empty": {"grad_y": no_rows, "x": no_rows}},
    gate=Gate(
        relative=4e-6,
        reason="signs equal; float32 sums over a group, and products in float32 in either type"
    ),
    compared=_sum_parts, large_reference=partial(sign_gradient_reference, digits=digits_large),
    scale_path=_scale_path,
    values={"grad_y": _draw_small, "x": _draw_small, "packed": {"digits": "trit"}},
)  # fmt: skip

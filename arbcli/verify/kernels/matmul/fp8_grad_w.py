"""Verification of `arbcli.kernels.matmul.fp8_grad_w`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.matmul.fp8_grad_w import fp8_grad_w
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.verify.kernels.matmul.transpose_quantised import (
    draw_quantised,
    transpose_quantised_reference,
)
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def fp8_grad_w_reference(
    grad_q: Tensor, grad_scale: Tensor, q: Tensor, scale: Tensor, _dtype: torch.dtype
) -> Tensor:
    """Compute the reference result of `fp8_grad_w`, in float64."""
    grad, grad_unit = transpose_quantised_reference(grad_q, grad_scale)
    x, unit = transpose_quantised_reference(q, scale)
    return (grad.double() @ x.double().T) * (grad_unit.double() * unit.double())


def _multiply_bf16(
    grad_q: Tensor, _grad_scale: Tensor, q: Tensor, _scale: Tensor, _dtype: torch.dtype
) -> Callable:
    """Multiply in bfloat16."""
    return partial(torch.matmul, grad_q.bfloat16().T, q.bfloat16())


def _draw(rng: CaseGenerator, _group_size: int, m: int, n: int, k: int) -> tuple:
    n, k = (-(-size // MULTIPLE) * MULTIPLE for size in (n, k))
    return *draw_quantised(rng, m, n), *draw_quantised(rng, m, k), rng.dtype


fp8_grad_w_verification = Verification(
    fp8_grad_w, fp8_grad_w_reference,
    changed={"zeros": {"grad_q": torch.zeros_like}},
    gate=Gate(relative=4e-3, reason="sums of the matrix library, rounded to bf16"), draw=_draw,
    needs_rows=True, uses_scales=False, library=_multiply_bf16,
)  # fmt: skip

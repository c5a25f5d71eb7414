"""Verification of `arbcli.kernels.norm.rms_norm`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from arbcli.kernels.norm.rms_norm import (
    WHOLE_ROW,
    add_rms_norm,
    normalise_sum,
    rms_norm,
    rms_norm_backward,
)
from arbcli.verify.verification import Verification, float32_sums, same_inputs


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute the reference result of `rms_norm`, in float64."""
    x = x.to(torch.float64)
    y = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(torch.float64)


def add_rms_norm_reference(
    x: Tensor, added: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm`: the sum rounded as in torch, then float64."""
    total = x + added
    return total, rms_norm_reference(total, weight, eps)


def rms_norm_backward_reference(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_backward` by autograd through the reference, in float64."""
    grads = grad_y.double(), x.double()
    grad_x, y = gradient_and_output(rms_norm_reference, *grads, weight, eps)
    return grad_x if other_grad is None else grad_x + other_grad.double(), y


def gradient_and_output(
    norm: Callable, grad_y: Tensor, x: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Differentiate norm(x, *options) by autograd; return the gradient of x, and the output."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = norm(x, *options)
        return torch.autograd.grad(y, x, grad_y)[0], y.detach()


def rms_norm_in_its_dtype(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute with torch operations in the dtype of `x`, as the peer for bf16."""
    return torch_rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def backward_in_its_dtype(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute gradient and sum with torch operations, in the dtype of `x`."""
    grad_x, y = gradient_and_output(rms_norm_in_its_dtype, grad_y, x, weight, eps)
    return grad_x if other_grad is None else grad_x + other_grad, y


_GATE = float32_sums("of up to 8197 squares", "one rounding, as torch has")
ROW_SIZES = {"B": "(m,)"}
ROW_SHAPES = ((0, 1, 40), (261, 1, 5))
"""Shapes without rows, and with many."""
SHAPES = (*ROW_SHAPES, (1, 1, WHOLE_ROW + 5))
"""`ROW_SHAPES`, and a row that is too wide for registers."""
EPS_VALUES = ("1e-6 if k > 4 else 0.1", "0.1")
"""Values of eps: 0.1 affects results, and avoids cancellation in gradients of narrow norms."""
NORM_VALUES = {"eps": EPS_VALUES}


def widened(values: Tensor) -> Tensor:
    """Repeat the values in one row that is too wide for registers."""
    indices = torch.arange(WHOLE_ROW + 5, device=values.device) % values.numel()
    return values.flatten()[indices][None]


rms_norm_verification = Verification(
    rms_norm, rms_norm_reference, gate=_GATE, sizes=ROW_SIZES, shapes=SHAPES,
    changed={"wide": {"x": widened, "weight": None}},
    peer=rms_norm_in_its_dtype, library=same_inputs(rms_norm_in_its_dtype),
    values=NORM_VALUES,
)  # fmt: skip
add_rms_norm_verification = Verification(
    add_rms_norm, add_rms_norm_reference, gate=_GATE, sizes=ROW_SIZES, shapes=SHAPES,
    changed={"wide": {"x": widened, "added": widened, "weight": None}},
    peer=normalise_sum(rms_norm_in_its_dtype),
    values=NORM_VALUES,
)  # fmt: skip
rms_norm_backward_verification = Verification(
    rms_norm_backward, rms_norm_backward_reference, gate=_GATE, sizes=ROW_SIZES, shapes=SHAPES,
    changed={"wide": {"grad_y": widened, "x": widened, "other_grad": None, "weight": None}},
    peer=backward_in_its_dtype,
    values=NORM_VALUES,
)  # fmt: skip

"""Verification of `arbcli.kernels.norm.gained_rms_norm`."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from arbcli.kernels.norm.gained_rms_norm import gained_rms_norm_backward
from arbcli.verify.kernels.norm.rms_norm import EPS_VALUES, ROW_SIZES, SHAPES, rms_norm_reference
from arbcli.verify.verification import Verification, float32_sums


def gained_rms_norm_backward_reference(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `gained_rms_norm_backward` by autograd through the reference."""
    x, weight = (part.detach().double().requires_grad_() for part in (x, weight))
    with torch.enable_grad():
        y = rms_norm_reference(x, weight, eps)
        grad_x, grad_gain = torch.autograd.grad(y, (x, weight), grad_y.double())
    return grad_x if other_grad is None else grad_x + other_grad.double(), y.detach(), grad_gain


def gained_gradient_in_its_dtype(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, other_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients and sum with torch operations, in the dtype of `x`."""
    x, weight = (part.detach().requires_grad_() for part in (x, weight))
    with torch.enable_grad():
        y = torch_rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)
        grad_x, grad_gain = torch.autograd.grad(y, (x, weight), grad_y)
    return grad_x if other_grad is None else grad_x + other_grad, y.detach(), grad_gain


_GATE = float32_sums("of up to 8197 squares, and over all rows", "no worse than torch")
gained_rms_norm_backward_verification = Verification(
    gained_rms_norm_backward, gained_rms_norm_backward_reference, gate=_GATE,
    sizes=ROW_SIZES, shapes=SHAPES,
    peer=gained_gradient_in_its_dtype, values={"eps": EPS_VALUES},
)  # fmt: skip

"""Verification of `arbcli.kernels.norm.gained_rms_norm`."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from arbcli.kernels.norm.gained_rms_norm import gained_rms_norm_backward
from arbcli.verify.kernels.norm.rms_norm import (
    EPS_VALUES,
    ROW_SIZES,
    SHAPES,
    TIMED_EPS,
    rms_norm_reference,
)
from arbcli.verify.verification import Gate, Timing, Verification


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


def _backward_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    x, grad_y = torch.randn(2, 16384, 2048, device=device, dtype=torch.bfloat16)
    gain = torch.randn(2048, device=device)
    low = gain.to(x.dtype)
    _, r = torch.ops.aten._fused_rms_norm(x, low.shape, low, TIMED_EPS)
    inputs = (grad_y, x, low.shape, r, low, [True, True])

    def peer() -> object:
        return torch.ops.aten._fused_rms_norm_backward(*inputs)

    yield Timing("16384x2048 bf16", (grad_y, x, gain, TIMED_EPS, x), peer=peer)


_GATE = Gate(
    relative=1e-5, peer_slack=0.1,
    reason="float32 sums of up to 8197 squares, and over all rows; in bf16 no worse than torch",
)  # fmt: skip
gained_rms_norm_backward_verification = Verification(
    gained_rms_norm_backward, gained_rms_norm_backward_reference, gate=_GATE,
    sizes=ROW_SIZES, shapes=SHAPES,
    peer=gained_gradient_in_its_dtype, timings=_backward_timings, values={"eps": EPS_VALUES},
)  # fmt: skip

"""Verification of `arbcli.families.mamba.kernels.causal_conv`."""

import torch
from torch import Tensor

from arbcli.families.mamba.kernels.causal_conv import causal_conv, causal_conv_grad_w
from arbcli.verify.verification import Verification, float32_sums


def causal_conv_reference(x: Tensor, w: Tensor, reverse: bool) -> Tensor:
    """Compute the reference result of `causal_conv`, a position and a tap at a time in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    length, taps = x.shape[1], w.shape[1]
    for t in range(length):
        for i in range(taps):
            source = t + taps - 1 - i if reverse else t - taps + 1 + i
            if 0 <= source < length:
                y[:, t] += w[:, i].double() * x[:, source].double()
    return y


def causal_conv_grad_w_reference(grad_y: Tensor, x: Tensor, taps: int) -> Tensor:
    """Compute the reference result of `causal_conv_grad_w`, a position and a tap at a time."""
    grad = torch.zeros(x.shape[2], taps, dtype=torch.float64, device=x.device)
    for t in range(x.shape[1]):
        for i in range(taps):
            if t - taps + 1 + i >= 0:
                grad[:, i] += (grad_y[:, t].double() * x[:, t - taps + 1 + i].double()).sum(dim=0)
    return grad


_GATE = float32_sums("over taps, or over the sequence")

causal_conv_verification = Verification(
    causal_conv, causal_conv_reference, gate=_GATE, shapes=((0, 1, 5),),
    sizes={"B": (1, 3), "T": "m", "W": (1, 4, 8)},
    values={"reverse": (False, True)},
)  # fmt: skip
causal_conv_grad_w_verification = Verification(
    causal_conv_grad_w, causal_conv_grad_w_reference,
    gate=_GATE, shapes=((0, 1, 5),),
    sizes={"B": (1, 3), "T": "m + 8"},
    values={"taps": (1, 4, 8)},
)  # fmt: skip

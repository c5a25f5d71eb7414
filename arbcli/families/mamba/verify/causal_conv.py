"""Verification of `arbcli.families.mamba.kernels.causal_conv`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.families.mamba.kernels.causal_conv import (
    causal_conv,
    causal_conv_grad_w,
)
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Gate, Timing, Verification


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


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    x = torch.randn(16, 4096, 1152, device=device, dtype=torch.bfloat16)
    w = torch.randn(1152, 4, device=device)
    weight = w.bfloat16()[:, None]
    peer = partial(functional.conv1d, x.mT.contiguous(), weight, padding=3, groups=1152)
    yield Timing("16x4096x1152, 4 taps bf16", (x, w, False), peer=peer, peer_name="conv1d")


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over taps, or over the sequence; in bf16 no worse than one rounding",
)  # fmt: skip

causal_conv_verification = Verification(
    causal_conv, causal_conv_reference, gate=_GATE, shapes=((0, 1, 5),),
    sizes={"B": (1, 3), "T": "m", "W": (1, 4, 8)}, timings=_timings,
    values={"reverse": (False, True)},
)  # fmt: skip
causal_conv_grad_w_verification = Verification(
    causal_conv_grad_w, causal_conv_grad_w_reference,
    gate=_GATE, shapes=((0, 1, 5),),
    sizes={"B": (1, 3), "T": "m + 8"},
    timed=[
        Timed("16x4096x1152, 4 taps bf16", causal_conv_grad_w.torch, B=16, T=4096, D=1152, taps=4)
    ],
    values={"taps": (1, 4, 8)},
)  # fmt: skip

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
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Gate, Timing, Verification, cases_of


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


def _draw(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Draw (label, x, taps, gradient of the result)."""
    generator = torch.Generator().manual_seed(0)
    draw = normals(generator, device)
    for batch, length, width, taps in ((1, 1, 1, 4), (2, 33, 7, 4), (3, 5, 133, 8), (1, 18, 9, 1)):
        shape = batch, length, width
        label = f"{batch}x{length}x{width}, {taps} taps"
        yield label, draw(*shape), draw(width, taps), draw(*shape)
    x, grad_y = (draw(7, 9, 6).permute(2, 1, 0)[::2] for _ in range(2))
    yield "3x9x7, 4 taps strided", x, draw(4, 7).T, grad_y
    yield "2x0x5, 4 taps empty", draw(2, 0, 5), draw(5, 4), draw(2, 0, 5)
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        x, grad_y = (draw(3, 300, 776).bfloat16() for _ in range(2))
        yield "3x300x776, 4 taps bf16", x, draw(776, 4), grad_y


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    for label, x, w, _ in _draw(device):
        for reverse in (False, True):
            yield Case(f"{label}{' reverse' if reverse else ''}", (x, w, reverse))


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
    causal_conv, causal_conv_reference, _cases, _GATE,
    sizes={"B": (1, 3), "T": "m", "W": (1, 4, 8)}, timings=_timings,
    values={"reverse": (False, True)},
)  # fmt: skip
causal_conv_grad_w_verification = Verification(
    causal_conv_grad_w, causal_conv_grad_w_reference,
    cases_of(_draw, lambda x, w, grad_y: (grad_y, x, w.shape[1])), _GATE,
    sizes={"B": (1, 3), "T": "m + 8"},
    timed=[
        Timed("16x4096x1152, 4 taps bf16", causal_conv_grad_w.torch, B=16, T=4096, D=1152, taps=4)
    ],
    values={"taps": (1, 4, 8)},
)  # fmt: skip

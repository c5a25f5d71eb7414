"""Verification of `arbcli.families.streams.kernels.mix_streams`."""

import torch
from torch import Tensor

from arbcli.families.streams.kernels.mix_streams import (
    mix_streams,
    mix_streams_backward,
)
from arbcli.families.streams.kernels.stream_weights import STREAMS
from arbcli.verify.verification import Gate, Verification


def mix_streams_reference(
    x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> Tensor:
    """Compute the reference result of `mix_streams`, in float64."""
    y = torch.einsum("mij,mjd->mid", weights.double(), x.double())
    if added is not None and gains is not None:
        y = y + torch.einsum("mi,md->mid", gains.double(), added.double())
    return y


def mix_streams_backward_reference(
    grad_y: Tensor, x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the reference result of `mix_streams_backward`, by autograd in float64."""
    inputs = [part.double().requires_grad_() for part in (x, weights)]
    if added is not None and gains is not None:
        inputs += [part.double().requires_grad_() for part in (added, gains)]
    y = mix_streams_reference(*inputs, *[None] * (4 - len(inputs)))
    return torch.autograd.grad(y, inputs, grad_y.double())


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over streams and columns; in bf16 no worse than one rounding",
)  # fmt: skip
_SIZES = {"S": STREAMS, "R": STREAMS}

mix_streams_verification = Verification(
    mix_streams,
    mix_streams_reference,
    gate=_GATE,
    shapes=((0, 1, 7),),
    sizes=_SIZES,
)
mix_streams_backward_verification = Verification(
    mix_streams_backward, mix_streams_backward_reference,
    gate=_GATE, shapes=((0, 1, 7),), sizes=_SIZES,
)  # fmt: skip

"""Verification of `arbcli.families.streams.kernels.mix_streams`."""

import torch
from torch import Tensor

from arbcli.families.streams.kernels.mix_streams import mix_streams, mix_streams_backward
from arbcli.families.streams.kernels.stream_weights import STREAMS
from arbcli.verify.verification import Verification, float32_sums, gradients_of


def mix_streams_reference(
    x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> Tensor:
    """Compute the reference result of `mix_streams`, in float64."""
    y = torch.einsum("mij,mjd->mid", weights.double(), x.double())
    if added is not None and gains is not None:
        y = y + torch.einsum("mi,md->mid", gains.double(), added.double())
    return y


_GATE = float32_sums("over streams and columns")
_SIZES = {"S": STREAMS, "R": STREAMS}

mix_streams_verification = Verification(
    mix_streams, mix_streams_reference, gate=_GATE, shapes=((0, 1, 7),), sizes=_SIZES
)
mix_streams_backward_verification = Verification(
    mix_streams_backward, gradients_of(mix_streams_reference, range(4)),
    gate=_GATE, shapes=((0, 1, 7),), sizes=_SIZES,
)  # fmt: skip

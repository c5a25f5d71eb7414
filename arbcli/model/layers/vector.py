"""Packed vectors and taps: small tensors that are read whole, as numbers and not as a matrix.

A vector of n numbers is a packed matrix of (n, 1): every number has a trit and a scale of its own.
So its size is stored to 1/128 of an octave, and its steps are shares of it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.config.dense import ModelConfig
from arbcli.kernels.codec.packed import HIGHEST_EXPONENT, LOWEST_EXPONENT, OCTAVE
from arbcli.kernels.codec.packing import pack_trits
from arbcli.model.layers.streamed import StreamedTensor, anchor


class ReadWeight(StreamedTensor):
    """A packed tensor that is decoded, and whose gradient comes as it is."""

    def hand_on(self, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Add up the gradients of all uses, and give that to the sink."""
        self.sink(self, grad_y.view(len(sources), self.out_features, -1).sum(dim=0))


class VectorWeight(ReadWeight):
    """A packed vector whose first values are given, none of them zero."""

    def __init__(self, values: Sequence[float], config: ModelConfig, *, area: str) -> None:
        super().__init__(len(values), 1, config, area=area)
        self.values = tuple(values)

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Set trits to the signs of the first values, and scales to their sizes.

        Where weights are trits alone z begins at its end, as far as can be from a trit of zero:
        there a number moves by its scale.
        """
        for buffer in self.buffers():
            buffer.zero_()
        rule, device = self.rule, self.trits.device
        largest = rule.radix + rule.remainder_max
        z, share = (rule.radix, rule.radix / self.packed.unit) if rule.reads_all else (largest, 1)
        signs = torch.tensor([[1 if value > 0 else -1] for value in self.values], device=device)
        self.trits.copy_(pack_trits(signs.to(torch.int8)))
        rule.start(self.state, slice(None), ((z - rule.radix) * signs).to(torch.int8))
        steps = [round(OCTAVE * math.log2(abs(value) / share)) for value in self.values]
        if not rule.has_fraction:
            steps = [round(step / OCTAVE) * OCTAVE for step in steps]
        least, most = LOWEST_EXPONENT * OCTAVE, HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1
        v = torch.tensor([[min(max(step, least), most)] for step in steps], device=device)
        self.exponent.copy_(v // OCTAVE)
        if rule.has_fraction:
            self.fraction.copy_(v % OCTAVE)
        if self.direction is not None:
            self.direction.start(self.state)


class _Read(Function):
    """Decode; the gradient goes to the tensor's sink."""

    @staticmethod
    def forward(ctx, _anchor: Tensor, weight: ReadWeight) -> Tensor:
        ctx.weight = weight
        return weight.weight(torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.weight.collect(None, grad)
        return None, None


class TernaryVector(nn.Module):
    """A packed vector of n numbers.

    Args:
        values: the first ones, none of them zero.
        config: of the model.
        area: the part of the model that it belongs to.
    """

    def __init__(self, values: Sequence[float], config: ModelConfig, *, area: str) -> None:
        super().__init__()
        self.weight = VectorWeight(values, config, area=area)

    def forward(self) -> Tensor:
        """Decode to (n,) float32; differentiable."""
        self.weight.note_use()
        return _Read.apply(anchor(self.weight.trits), self.weight).flatten()


class TernaryTaps(nn.Module):
    """The packed taps of a short convolution, so many for each channel.

    Args:
        channels: D.
        taps: W.
        config: of the model.
        area: the part of the model that they belong to.
    """

    def __init__(self, channels: int, taps: int, config: ModelConfig, *, area: str) -> None:
        super().__init__()
        self.weight = ReadWeight(channels, taps, config, area=area, std=1 / math.sqrt(taps))

    def forward(self) -> Tensor:
        """Decode to (D, W) float32; differentiable."""
        self.weight.note_use()
        return _Read.apply(anchor(self.weight.trits), self.weight)

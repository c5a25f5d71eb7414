"""Packed vectors and taps: small tensors that are read whole, as numbers and not as a matrix.

A vector of n numbers is a packed matrix of (n, 1): every number has digits and a scale of its own.
All of its digits count, also where the weights of matrices are trits alone.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.config.site import Site
from arbcli.directions.base import State
from arbcli.kernels.codec.packed import HIGHEST_EXPONENT, LOWEST_EXPONENT, OCTAVE, Packed
from arbcli.kernels.codec.packing import pack_trits
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.streamed import GradientSink, StreamedTensor

DIRECTION = "factored"
"""Of steps: rows have nothing to be orthogonal to, and gradients of sizes of their own."""


class ReadWeight(StreamedTensor):
    """A packed tensor that is decoded, and whose gradient comes as it is."""

    def hand_on(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Add up the gradients of all uses, and give that to the sink."""
        sink(self, grad_y.view(len(sources), self.out_features, -1).sum(dim=0))


SCALE_OF_ZERO = 0.1
"""The value whose scale a number has that begins at zero: steps are shares of it."""


class VectorWeight(ReadWeight):
    """A packed vector whose first values are given."""

    def __init__(self, values: Sequence[float], site: Site, *, area: str) -> None:
        super().__init__(len(values), 1, site, area=area, direction=DIRECTION)
        self.values = tuple(values)
        # a forward reads it here, whatever it reads elsewhere
        self.of_training = tuple(name for name in self.of_training if name != "remainder")

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Set digits to the signs of the first values, and scales to their sizes."""
        for buffer in self.buffers():
            buffer.zero_()
        rule, device, share = self.rule, self.trits.device, 1.0
        signs = torch.tensor([[(value > 0) - (value < 0)] for value in self.values], device=device)
        self.trits.copy_(pack_trits(signs.to(torch.int8)))
        if self.packed.remainder is not None:
            # half-way to the end, where a unit is a small share and there is room to grow
            z = (rule.radix + rule.remainder_max) // 2
            rule.start(self.state, slice(None), ((z - rule.radix) * signs).to(torch.int8))
            share = z / self.packed.unit
        sizes = [abs(value) or SCALE_OF_ZERO for value in self.values]
        steps = [round(OCTAVE * math.log2(size / share)) for size in sizes]
        if not rule.has_fraction:
            steps = [round(step / OCTAVE) * OCTAVE for step in steps]
        least, most = LOWEST_EXPONENT * OCTAVE, HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1
        v = torch.tensor([[min(max(step, least), most)] for step in steps], device=device)
        self.exponent.copy_(v // OCTAVE)
        if rule.has_fraction:
            self.fraction.copy_(v % OCTAVE)
        if self.direction is not None:
            self.direction.start(self.state)

    def packed_of(self, state: State) -> Packed:
        """Read all digits of the numbers, whatever the weights of the model are.

        A trit alone would jump from its size to nothing: dt of a head was seen to.
        """
        packed = super().packed_of(state)
        if "remainder" not in state:
            return packed
        return packed._replace(
            remainder=state["remainder"], radix=self.rule.radix, nibble=self.rule.share_a_byte
        )


class _Read(Function):
    """Decode; the gradient goes to the tensor's sink."""

    @staticmethod
    def forward(weight: ReadWeight, in_features: int, anchor: Tensor, trained: bool) -> Tensor:
        if trained:
            weight.await_backward()
        return weight.weight(torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.weight = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.weight.collect(None, grad)
        return None, None, None, None


_read = operator(
    _Read, lambda trits, width, *_: torch.empty(len(trits), width, device=trits.device)
)


class _ReadWhole(nn.Module):
    """A packed tensor that is decoded whole."""

    weight: ReadWeight
    _prepared: Tensor | None = None

    def prepared(self) -> Tensor:
        """Decode once; `prepacked_once` says until when."""
        if self._prepared is None:
            self._prepared = self.weight.weight(torch.float32).squeeze(1)
            if self._prepared.is_cuda:  # kernels that overlap read it without waiting for any
                torch.cuda.synchronize(self._prepared.device)
        return self._prepared

    @contextmanager
    def prepacked_once(self) -> Iterator[None]:
        """Keep what was decoded for steps; meanwhile the weights must not change."""
        try:
            yield
        finally:
            self._prepared = None


class TernaryVector(_ReadWhole):
    """A packed vector of n numbers.

    Args:
        values: the first ones.
        site: where it stands.
        area: the part of the model that it belongs to.
    """

    def __init__(self, values: Sequence[float], site: Site, *, area: str) -> None:
        super().__init__()
        self.weight = VectorWeight(values, site, area=area)

    def forward(self) -> Tensor:
        """Decode to (n,) float32; differentiable."""
        return _read(self.weight, 1).flatten()


class TernaryTaps(_ReadWhole):
    """The packed taps of a short convolution, so many for each channel.

    Args:
        channels: D.
        taps: W.
        site: where it stands.
        area: the part of the model that they belong to.
    """

    def __init__(self, channels: int, taps: int, site: Site, *, area: str) -> None:
        super().__init__()
        self.weight = ReadWeight(
            channels, taps, site, area=area, std=1 / math.sqrt(taps), direction=DIRECTION
        )

    def forward(self) -> Tensor:
        """Decode to (D, W) float32; differentiable."""
        return _read(self.weight, self.weight.in_features)

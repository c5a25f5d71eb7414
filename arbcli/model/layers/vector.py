"""Packed vectors and convolution taps, which are decoded completely before use.

A vector of n numbers is a packed matrix of shape (n, 1): each number has its own digits and scale.
Its value includes the remainder, even if the weights of matrices are ternary.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.config.layer_spec import LayerSpec
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import pack_trits
from arbcli.model.layers.compiled import operator
from arbcli.model.optimizers.base import State
from arbcli.model.packed import DecodingLayer, GradientSink, StreamedTensor

DIRECTION = "factored"
"""Direction of the steps: orthogonalisation makes no sense for single columns."""


class ReadWeight(StreamedTensor):
    """A packed tensor whose decoded values are the output of a layer."""

    def emit_gradient(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Sum the gradients of all uses, and pass the sum, (N, K), to the sink.

        Args:
            sink: consumer of the gradient.
            sources: None for each use.
            grad_y: gradients of the decoded values of all uses, concatenated: (uses * N, K), or
                (uses * N,) if K is 1.
        """
        sink(self, grad_y.view(len(sources), self.out_features, -1).sum(dim=0))


SCALE_OF_ZERO = 0.1
"""Scale of numbers that are initialised to zero; their steps are relative to it."""


class VectorWeight(ReadWeight):
    """A packed vector with given initial values."""

    def __init__(self, values: Sequence[float], spec: LayerSpec, *, area: str) -> None:
        super().__init__(len(values), 1, spec, area=area, direction=DIRECTION)
        self.values, self.decays = tuple(values), False
        # the forward of a vector always reads the remainder
        self.training_only = tuple(name for name in self.training_only if name != "remainder")

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Set digits to the signs of the initial values, and scales to their magnitudes."""
        for buffer in self.buffers():
            buffer.zero_()
        rule, device, share = self.rule, self.trits.device, 1.0
        signs = torch.tensor([[(value > 0) - (value < 0)] for value in self.values], device=device)
        self.trits.copy_(pack_trits(signs.to(torch.int8)))
        if self.packed.remainder is not None:
            # half of the range: fine resolution, and room to grow
            z = (rule.radix + rule.remainder_max) // 2
            rule.start(self.state, slice(None), ((z - rule.radix) * signs).to(torch.int8))
            share = z / self.packed.unit
        self._start_scales((abs(value) or SCALE_OF_ZERO) / share for value in self.values)

    def packed_of(self, state: State) -> Packed:
        """Include the remainder, whatever the form of the model's weights.

        A trit would jump between its scale and 0, which has been observed for dt of Mamba heads.
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


class _DecodedLayer(DecodingLayer):
    """Base of layers whose output is a decoded packed tensor."""

    weight: ReadWeight
    _prepared: Tensor | None = None

    def prepared(self) -> Tensor:
        """Return the decoded tensor, (n,) or (D, W) float32, cached within `prepacked_once`."""
        if self._prepared is None:
            self._prepared = self.weight.weight(torch.float32).squeeze(1)
            if self._prepared.is_cuda:  # kernels that overlap read it without synchronisation
                torch.cuda.synchronize(self._prepared.device)
        return self._prepared

    @contextmanager
    def prepacked_once(self) -> Iterator[None]:
        """Cache the decoded tensor within the block; the weights must not change meanwhile."""
        try:
            yield
        finally:
            self._prepared = None


class TernaryVector(_DecodedLayer):
    """A packed vector of n numbers.

    Args:
        values: initial values.
        spec: storage settings and width of the stage.
        area: parameter group of the vector.
    """

    def __init__(self, values: Sequence[float], spec: LayerSpec, *, area: str) -> None:
        super().__init__()
        self.weight = VectorWeight(values, spec, area=area)

    def forward(self) -> Tensor:
        """Decode to (n,) float32; differentiable."""
        return _read(self.weight, 1).flatten()


class TernaryTaps(_DecodedLayer):
    """The packed taps of a short depthwise convolution.

    Args:
        channels: D.
        taps: W, number of taps for each channel.
        spec: storage settings and width of the stage.
        area: parameter group of the taps.
    """

    def __init__(self, channels: int, taps: int, spec: LayerSpec, *, area: str) -> None:
        super().__init__()
        self.weight = ReadWeight(
            channels, taps, spec, area=area, std=1 / math.sqrt(taps), direction=DIRECTION
        )

    def forward(self) -> Tensor:
        """Decode to (D, W) float32; differentiable."""
        return _read(self.weight, self.weight.in_features)

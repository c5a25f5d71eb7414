"""Packed tensors whose gradient is computed in the backward of their last use, for a sink."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from arbcli.model.layers.compiled import Findable
from arbcli.model.packed import GradientSink, TernaryTensor

NO_SINK = "a packed weight has no `sink`, so its gradient is discarded: set an `Updater`"

_recomputing = False


def recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of forward and recomputation, as `context_fn` of torch's `checkpoint`.

    A recomputed forward must not register uses, as no separate backward follows.
    """
    return nullcontext(), _recomputed()


def recomputing() -> bool:
    """Return whether a backward is recomputing a forward."""
    return _recomputing


@contextmanager
def _recomputed() -> Iterator[None]:
    global _recomputing
    _recomputing = True
    try:
        yield
    finally:
        _recomputing = False


class StreamedTensor(Findable, TernaryTensor):
    """A packed tensor whose gradient is passed to a sink in the backward of its last use.

    Each backward contributes a pair of input and output gradient. After the last one, the gradient
    is computed from all pairs, passed to `sink`, and freed. No tensor of the weight's shape is
    saved between forward and backward: the backward decodes the packed state again.
    """

    sink: GradientSink | None = None
    """Consumer of the gradient; None discards it, with a warning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forget()

    @property
    def key_tensor(self) -> Tensor:
        """The trits."""
        return self.trits

    def forget(self) -> None:
        """Discard registered uses, as after a forward whose backward was not run."""
        self._awaited = 0
        self._pairs: list[tuple[Any, Tensor]] = []

    def note_use(self) -> None:
        """Register a use while gradients are recorded."""
        if torch.is_grad_enabled():
            self.await_backward()

    def await_backward(self) -> None:
        """Register a use whose backward will run, unless the forward is recomputed."""
        if not _recomputing:
            self._awaited += 1

    def collect(self, source: Any, grad_y: Tensor) -> None:
        """Add the input and output gradient of one use; the last use computes the gradient."""
        self._pairs.append((source, grad_y))
        self._awaited -= 1
        if self._awaited > 0:
            return
        uses = self._pairs
        self.forget()
        if self.sink is not None:
            self.emit_gradient_of_uses(self.sink, uses)
        elif not self.frozen:
            warnings.warn(NO_SINK, RuntimeWarning, stacklevel=1)

    @property
    def is_awaited(self) -> bool:
        """Whether a use was registered whose backward has not run."""
        return self._awaited > 0

    @property
    def is_last_use(self) -> bool:
        """Whether only one use was registered, and its backward is next."""
        return self._awaited <= 1 and not self._pairs

    def emit_gradient_of_uses(self, sink: GradientSink, uses: list[tuple[Any, Tensor]]) -> None:
        """Compute the gradient from the pairs of all uses, and pass it to the sink."""
        sources, grads = zip(*uses, strict=True)
        self.emit_gradient(sink, sources, grads[0] if len(grads) == 1 else torch.cat(grads))

    def emit_gradient(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Compute the gradient from the inputs and concatenated output gradients, for the sink."""
        source = sources[0] if len(sources) == 1 else torch.cat(sources)
        sink(self, self.gradient(source, grad_y))

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Compute dL/dw, (N, K) float32 or bfloat16, from concatenated inputs and gradients."""
        raise NotImplementedError

"""Packed tensors whose gradient is formed in the backward of their last use, and handed on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from arbcli.model.layers.compiled import Findable
from arbcli.model.packed import GradientSink, TernaryTensor

_recomputing = False


def recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Give torch's `checkpoint`, as its `context_fn`, what a forward and its recomputation are in.

    A backward that computes a forward again would else count its uses, and wait for backwards of
    them that never come.
    """
    return nullcontext(), _recomputed()


def recomputing() -> bool:
    """Return whether a backward is computing a forward again."""
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
    """A packed tensor whose gradient is formed in the backward of its last use, and handed on.

    The pairs of what a use saw (input, gradient of its output) are kept until the last one has
    come, then one gradient is formed, given to `sink`, and dropped. Nothing weight-shaped is saved
    between forward and backward: the packed state is decoded again.
    """

    sink: GradientSink | None = None
    """Consumer of the gradient; None drops it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forget()

    @property
    def found_by(self) -> Tensor:
        """The trits."""
        return self.trits

    def forget(self) -> None:
        """Forget the uses of a forward whose backward never came."""
        self._awaited = 0
        self._pairs: list[tuple[Any, Tensor]] = []

    def note_use(self) -> None:
        """Count a use whose backward will come; a recomputed forward is none."""
        if torch.is_grad_enabled():
            self.await_backward()

    def await_backward(self) -> None:
        """Expect the backward of one use more; a recomputed forward has none of its own."""
        if not _recomputing:
            self._awaited += 1

    def collect(self, source: Any, grad_y: Tensor) -> None:
        """Take what the backward of one use saw; the last one forms the gradient."""
        self._pairs.append((source, grad_y))
        self._awaited -= 1
        if self._awaited > 0:
            return
        uses = self._pairs
        self.forget()
        if self.sink is not None:
            self.hand_on_uses(self.sink, uses)

    @property
    def is_last_use(self) -> bool:
        """Whether the next backward is that of the only use."""
        return self._awaited <= 1 and not self._pairs

    def hand_on_uses(self, sink: GradientSink, uses: list[tuple[Any, Tensor]]) -> None:
        """Form the gradient from the pairs of all uses, and give it to the sink."""
        sources, grads = zip(*uses, strict=True)
        self.hand_on(sink, sources, grads[0] if len(grads) == 1 else torch.cat(grads))

    def hand_on(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Form the gradient from what all uses saw, and give it to the sink."""
        source = sources[0] if len(sources) == 1 else torch.cat(sources)
        sink(self, self.gradient(source, grad_y))

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Form dL/dw, (N, K) float32 or bfloat16, from what all uses saw."""
        raise NotImplementedError

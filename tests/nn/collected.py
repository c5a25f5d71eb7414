"""Gradients of packed tensors, in place of an optimizer."""

from torch import nn


class Collected:
    """A sink that keeps the gradients of each tensor."""

    def __init__(self, module: nn.Module):
        self.grads, self.calls = {}, 0
        for name, part in module.named_modules():
            if hasattr(part, "anchor"):
                part.sink = self
                part.known_as = name.removesuffix("_packed")

    def __call__(self, tensor, grad, where=None):
        self.calls += 1
        self.grads[tensor.known_as] = grad if where is None else grad.flatten(0, 1)

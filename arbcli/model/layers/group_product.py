"""The product of small matrices that are decoded in groups: see `decoded_groups`."""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weights import decode_weights_triton
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.products import Product


class GroupProduct(Product):
    """A product whose launch decodes the matrices that are needed next, too."""

    __slots__ = ()
    name = "decoded in a group"

    def product(self, weight: LinearWeight, x: Tensor) -> Tensor:
        """Compute x @ w.T for (M, K) activations; keep w for a backward that begins with it."""
        assert weight.group is not None
        dense = _decode(weight, weight.group.forward_weights, x.dtype)
        if weight.group.kept_for_backward and weight.is_awaited:
            weight.make_ready(dense)
        return x @ dense.T

    def propagate(self, weight: LinearWeight, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w for the (M, N) gradient of a product."""
        assert weight.group is not None
        return grad_y @ _decode(weight, weight.group.backward_weights, grad_y.dtype)


def _decode(weight: LinearWeight, group: tuple[LinearWeight, ...], dtype: torch.dtype) -> Tensor:
    """Decode a weight, and in the same launch those of `group`, which are needed next.

    A weight decoded in advance is used once, if its version has not changed.
    """
    ready = weight.take_ready()
    if ready is not None and ready.dtype == dtype:
        return ready
    others = [other for other in group if other.number_format == "bf16"]
    dense, *rest = decode_weights_triton([weight.packed, *(w.packed for w in others)], dtype)
    for other, decoded in zip(others, rest, strict=True):
        other.make_ready(decoded)
    return dense

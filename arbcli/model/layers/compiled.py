"""What a compiler sees of the layers: operators that it takes whole.

A layer decodes packed weights, and its backward steps them: nothing that `torch.compile` could
trace. So inside a compiled function a layer is one operator, and a user's own
`torch.compile(block, fullgraph=True)` works, with one compilation for all blocks of a kind.

An operator is given tensors only. It finds its layer by the memory of the layer's trits.
"""

from weakref import WeakSet, ref

import torch
from torch import Tensor, nn


class Findable(nn.Module):
    """A module that an operator can find by the trits of its `weight`."""

    def __init__(self) -> None:
        super().__init__()
        _findable.add(self)

    def __setstate__(self, state: dict) -> None:
        """Let a copy be found too."""
        super().__setstate__(state)
        _findable.add(self)


_findable: WeakSet[Findable] = WeakSet()
_found: dict[int, "ref[Findable]"] = {}


def find(trits: Tensor) -> Findable:
    """Find the module whose weight has these trits.

    Raises:
        LookupError: there is none: they are a copy.
    """
    place = trits.data_ptr()
    known = _found.get(place, lambda: None)()
    if known is None or known.weight.trits.data_ptr() != place:
        having = (part for part in _findable if part.weight is not None)
        known = next((part for part in having if part.weight.trits.data_ptr() == place), None)
        if known is None:
            raise LookupError("no layer has these trits: a compiler gave a copy of them")
        _found[place] = ref(known)
    return known


def refuse_without_gradient(x: Tensor) -> None:
    """Refuse a compiled layer whose backward would never come.

    Raises:
        RuntimeError: gradients are wanted, and `x` requires none.
    """
    if torch.is_grad_enabled() and not x.requires_grad:
        raise RuntimeError(
            "a compiled layer steps its weights only if its input requires a gradient, as the"
            " output of an embedding does; without training use torch.no_grad()"
        )

"""A sample of a kernel's cases, which has all that any of them has; all take twice as long.

The faults that are planted in kernels are found with it.
"""

import operator
import re
from collections.abc import Callable, Sequence

import torch

from arbcli.kernels.codec.packed import Packed


def properties(case) -> set:
    """List the words of a case's label, and kinds, layouts and magnitudes of its inputs."""
    names = {re.sub(r"\d+", "0", case.label.removesuffix(" bf16"))}

    def add(place: tuple, value: object) -> None:
        if isinstance(value, Packed):
            kind = value.remainder is None, value.fraction is None, value.nibble, value.radix
            names.add((place, kind))
            add((*place, "columns"), torch.empty(1, value.in_features, device="meta"))
            value = tuple(value[:2])
        if isinstance(value, torch.Tensor):
            steps = value.stride()
            order = tuple(map(operator.lt, steps, steps[1:])), steps[-1:] == (1,)
            names.update({(place, value.dtype, value.dim()), (place, order)})
            for dim, size in enumerate(value.shape):
                names.add((place, dim, min(size, 2), size % 16 == 0))
                names.add((place, dim, size.bit_length() // 2, size > 32))
        elif isinstance(value, tuple):
            for index, part in enumerate(value):
                add((*place, index), part)
        else:
            exact = isinstance(value, bool | str | None)
            names.add((place, type(value), value if exact else None))

    add((), tuple(case.inputs))
    return names


def sample(items: Sequence, case_of: Callable = lambda item: item) -> list:
    """Choose items whose cases have all properties that any has, small ones first."""
    named = [properties(case_of(item)) for item in items]
    missing, chosen = set().union(*named), []

    def gain(index: int) -> float:
        tensors = (x for x in case_of(items[index]).inputs if isinstance(x, torch.Tensor | Packed))
        elements = (x.trits if isinstance(x, Packed) else x for x in tensors)
        return len(named[index] & missing) / (20 + sum(x.numel() ** 0.5 for x in elements))

    while missing:
        index = max(range(len(items)), key=gain)
        chosen.append(items[index])
        missing -= named[index]
    return chosen

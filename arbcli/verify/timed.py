"""Timings of an operation with inputs drawn from the declaration of its arguments."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import Argument, Arguments, Array, Number, evaluate
from arbcli.verify.case_generator import CaseGenerator, draw_argument
from arbcli.verify.verification import Timing

MATRIX = (11264, 2048)
"""(N, K) that kernels are timed on: the largest matrix of a model of 1.2 billion weights."""
MATRIX_SIZES: dict[str, Any] = {"N": MATRIX[0], "K": MATRIX[1]}
"""Sizes of the largest matrix that is timed."""


class FirstOptions(CaseGenerator):
    """Generator that always picks the first option; only the elements of tensors are random."""

    def below(self, limit: int) -> int:
        """Return 0."""
        return 0


class Timed:
    """A timing of an operation at a production size.

    Values are bfloat16 if that is supported, and optional arguments are omitted unless given.

    Args:
        label: shapes, and the variant if an operation has several.
        peer: torch's operation, called with the same inputs.
        peer_name: name of the peer.
        flops: multiplications and additions of a bf16 product, computed from sizes.
        sizes: sizes and arguments. A number fills a tensor, two numbers are the range of its
            integers, a dtype is that of its values, and a function of a generator and the shape
            returns it.
    """

    def __init__(
        self, label: str, peer: Callable | None = None, peer_name: str = "torch",
        flops: str = "0", **sizes: Any,
    ) -> None:  # fmt: skip
        self.label, self.peer, self.peer_name = label, peer, peer_name
        self.flops, self.sizes = flops, sizes

    def draw(
        self, arguments: Arguments, values: Mapping[str, Any], device: torch.device, group_size: int
    ) -> Timing:
        """Draw the inputs."""
        rng = FirstOptions(0, device, torch.bfloat16)
        inputs = [
            self._draw(name, kind, values.get(name), rng, group_size)
            for name, kind in arguments.items()
        ]
        peer = None if self.peer is None else partial(self.peer, *inputs)
        flops = evaluate(self.flops, self.sizes)
        return Timing(self.label, tuple(inputs), None, peer, self.peer_name, flops)

    def _draw(
        self, name: str, kind: Argument, values: Any, rng: CaseGenerator, group_size: int
    ) -> Any:
        value = self.sizes.get(name)
        if isinstance(kind, Number):
            if name in self.sizes:
                return value
        elif value is None and kind.optional:
            return None
        elif isinstance(kind, Array) and value is not None:
            if isinstance(value, torch.dtype):
                value = partial(CaseGenerator.reals, dtype=value)
            elif not isinstance(value, tuple) and not callable(value):
                value = partial(_filled, value=value, dtype=kind.dtypes[0])
            values = value
        return draw_argument(kind, values, rng, group_size, self.sizes)


def _filled(rng: CaseGenerator, *shape: int, value: float, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=rng.device)

"""Timings of an operation whose inputs follow from what it declares of its arguments."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime.arguments import Argument, Arguments, Array, Number, evaluate
from arbcli.kernels.runtime.operation import MATRIX, Timing, draw_argument

OF_MATRIX: dict[str, Any] = {"N": MATRIX[0], "K": MATRIX[1]}
"""Sizes of the largest matrix."""


class FirstDice(Dice):
    """Dice that choose the first of everything; numbers in tensors are drawn."""

    def below(self, limit: int) -> int:
        """Give 0."""
        return 0


class Timed:
    """A production size, which the inputs of an operation are drawn in.

    Values are bfloat16 where they may be, and what may be left out is, unless it is given.

    Args:
        label: shapes, and the kind where an operation has several.
        peer: torch's own operation, which is given the inputs.
        peer_name: its name.
        flops: multiplications and additions of a product in bf16, computed from sizes.
        given: sizes; and arguments: a number fills a tensor, two are the range of its integers, a
            type of reals is what it is drawn in, and a function makes it, of dice and its shape.
    """

    def __init__(
        self, label: str, peer: Callable | None = None, peer_name: str = "torch",
        flops: str = "0", **given: Any,
    ) -> None:  # fmt: skip
        self.label, self.peer, self.peer_name = label, peer, peer_name
        self.flops, self.given = flops, given

    def draw(self, arguments: Arguments, device: torch.device, group_size: int) -> Timing:
        """Draw the inputs."""
        dice = FirstDice(0, device, torch.bfloat16)
        inputs = [self._draw(name, kind, dice, group_size) for name, kind in arguments.items()]
        peer = None if self.peer is None else partial(self.peer, *inputs)
        flops = evaluate(self.flops, self.given)
        return Timing(self.label, tuple(inputs), None, peer, self.peer_name, flops)

    def _draw(self, name: str, kind: Argument, dice: Dice, group_size: int) -> Any:
        value = self.given.get(name)
        if isinstance(kind, Number):
            if name in self.given:
                return value
        elif value is None and kind.optional:
            return None
        elif isinstance(kind, Array) and value is not None:
            if isinstance(value, torch.dtype):
                value = partial(Dice.reals, dtype=value)
            elif not isinstance(value, tuple) and not callable(value):
                value = partial(_filled, value=value, dtype=kind.dtypes[0])
            kind = replace(kind, values=value)
        return draw_argument(kind, dice, group_size, self.given)


def _filled(dice: Dice, *shape: int, value: float, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=dice.device)

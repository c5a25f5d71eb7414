"""Batched torch and reference implementations, which process texts one by one."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def text_by_text(argument: int, *shared: int) -> Callable[[Callable], Callable]:
    """Extend an implementation for one text to several texts, processed one by one.

    The decorated function does as before with a scalar position. With positions of (B,), its other
    tensors have a dimension for texts in front; each text is computed from its own part of them,
    written in place, and results are stacked.

    Args:
        argument: index of the position argument.
        shared: indices of the arguments that all texts share.
    """

    def decorate(run: Callable) -> Callable:
        @wraps(run)
        def run_by_text(*inputs: Any) -> Any:
            if not inputs[argument].dim():
                return run(*inputs)
            results = []
            for text in range(len(inputs[argument])):
                inputs_of_text = (
                    part if index in shared else _select_text(part, text)
                    for index, part in enumerate(inputs)
                )
                results.append(run(*inputs_of_text))
            if isinstance(results[0], tuple):
                return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
            return None if results[0] is None else torch.stack(results)

        return run_by_text

    return decorate


def _select_text(part: Any, text: int) -> Any:
    if isinstance(part, tuple):
        return tuple(_select_text(element, text) for element in part)
    return part[text] if isinstance(part, Tensor) else part


def stacked_texts(cases: list[tuple], *shared: int) -> tuple:
    """Stack the inputs of several texts to one case of a kernel.

    Args:
        cases: inputs of each text; all but tensors, and tensors that are `shared`, are taken from
            the first.
        shared: as of `text_by_text`.
    """

    def joined(parts: tuple) -> Any:
        if isinstance(parts[0], tuple):
            return tuple(map(joined, zip(*parts, strict=True)))
        return torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0]

    inputs = zip(*cases, strict=True)
    return tuple(
        parts[0] if index in shared else joined(parts) for index, parts in enumerate(inputs)
    )

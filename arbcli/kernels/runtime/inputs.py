"""Refuse what a kernel would read wrongly.

A kernel is given pointers: an input of another type, size or layout gives numbers all the same.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor


class TensorOptions(TypedDict):
    """Keyword arguments `dtype` and `device` of a new tensor."""

    dtype: torch.dtype
    device: torch.device


def check_contiguous(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Refuse a tensor that is not contiguous, or of another dtype or shape.

    Raises:
        ValueError: it is.
    """
    if x.dtype != dtype or x.shape != tuple(shape) or not x.is_contiguous():
        layout = "" if x.is_contiguous() else f" and strides {x.stride()}"
        got = f"{x.dtype} of shape {tuple(x.shape)}{layout}"
        raise ValueError(f"{name}: need contiguous {dtype} of shape {tuple(shape)}, got {got}")


def check_scalars(dtype: torch.dtype, **scalars: Tensor) -> None:
    """Refuse what is no scalar tensor of a dtype, by name.

    Raises:
        ValueError: one is not.
    """
    for name, scalar in scalars.items():
        if scalar.dtype != dtype or scalar.dim():
            got = f"{scalar.dtype} of shape {tuple(scalar.shape)}"
            raise ValueError(f"{name}: need a scalar tensor of {dtype}, got {got}")


def check_element(name: str, x: Tensor, dtype: torch.dtype, texts: Sequence[int] = ()) -> None:
    """Refuse what is not one element of a dtype for each text, in as many dimensions as there are.

    Args:
        name: of the tensor.
        x: the tensor.
        dtype: that it must have.
        texts: (B,) of several texts, else empty.

    Raises:
        ValueError: it is not.
    """
    number = texts[0] if texts else 1
    if x.dtype != dtype or x.numel() != number or not x.is_contiguous():
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        need = "one element" if number == 1 else f"{number} elements"
        raise ValueError(f"{name}: need {need} of {dtype}, got {got}")

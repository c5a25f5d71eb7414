"""Types of keyword arguments of tensors, drawn ones, and ones that lie elsewhere as they did."""

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor


class TensorOptions(TypedDict):
    """Keyword arguments `dtype` and `device` of a new tensor."""

    dtype: torch.dtype
    device: torch.device


def placed(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device with its strides and offset, of which `to` keeps few."""
    if not x.numel():
        return x.to(device)
    steps = zip(x.shape, x.stride(), strict=True)
    length = x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps)
    memory = x.as_strided((length,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def normals(
    generator: torch.Generator, device: torch.device | None = None
) -> Callable[..., Tensor]:
    """Return a function that draws normal numbers of a shape, on the host, for a device."""
    return lambda *shape: torch.randn(shape, generator=generator).to(device)

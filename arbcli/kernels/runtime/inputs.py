"""Helpers for input tensors: options, names of dtypes, copies with the same strides, numbers."""

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor


class TensorOptions(TypedDict):
    """Keyword arguments `dtype` and `device` of a new tensor."""

    dtype: torch.dtype
    device: torch.device


def placed(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device with its strides and offset, which `to` does not always keep."""
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


def real_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes of real values in cases; the interpreter's bf16 arithmetic is wrong."""
    return (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, such as `float32`."""
    return str(dtype).removeprefix("torch.")

"""Types of keyword arguments of tensors."""

from typing import TypedDict

import torch


class TensorOptions(TypedDict):
    """Keyword arguments `dtype` and `device` of a new tensor."""

    dtype: torch.dtype
    device: torch.device

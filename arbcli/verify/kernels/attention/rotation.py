"""References and random inputs for `arbcli.kernels.attention.rotary_norm`."""

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (..., d) by (..., d / 2) angles, as complex numbers in float64."""
    found = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
    return torch.cat((found.real, found.imag), dim=-1)


def normalise_reference(x: Tensor, eps: float) -> Tensor:
    """Divide (..., d) by the root of its mean square plus eps."""
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()

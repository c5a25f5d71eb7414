"""Rotation of vectors by the angles of positions: numbers i and i + d / 2 are a complex number.

References share the first two functions with one another, and nothing with what they check.
"""

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (..., d) as complex numbers of float64, by (..., d / 2) angles."""
    found = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
    return torch.cat((found.real, found.imag), dim=-1)


def normalise_reference(x: Tensor, eps: float) -> Tensor:
    """Divide (..., d) by the root of its mean square plus eps."""
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (..., d) by angles that fit, (..., d / 2); differentiable, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

"""Rotary embedding of vectors: elements i and i + d / 2 are one complex number.

Only references use the first two functions; the implementations that they check do not.
"""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (..., d) by broadcastable (..., d / 2) angles; differentiable, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

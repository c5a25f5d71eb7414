"""References and random inputs for `arbcli.kernels.update.gram_inverses`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gram_inverses_reference(x: Tensor, shifts: Sequence[float], weights: Sequence[float]) -> Tensor:
    """Compute the reference result of `gram_inverses`, in float64, from singular values."""
    left, values, _ = torch.linalg.svd(x.double())
    squares = torch.zeros(x.shape[:-1], dtype=torch.float64)
    squares[..., : values.shape[-1]] = values**2
    size = squares.norm(dim=-1, keepdim=True)
    squares = squares / size
    factors = weights[0] + sum(
        weight / (squares + shift) for shift, weight in zip(shifts, weights[1:], strict=True)
    )
    return (left * (factors / size.sqrt())[..., None, :]) @ left.mT

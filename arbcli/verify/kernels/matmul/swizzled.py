"""References and random inputs for `arbcli.kernels.matmul.swizzled`."""

import torch
from torch import Tensor
from torch.nn import functional


def tiles_reference(
    x: Tensor, weight: Tensor, out_features: int, gated: bool, eps: float | None,
    added: Tensor | None,
) -> Tensor:  # fmt: skip
    """Normalise rows, multiply, gate and add in float64, with a decoded (T, 2, 8, K) matrix."""
    x = x.double()
    if eps is not None:
        x = x / ((x * x).sum(1, keepdim=True) / x.shape[1] + eps) ** 0.5
    y = torch.einsum("thrk,mk->mthr", weight, x)
    if gated:
        y = y[:, :, 0] / (1 + torch.exp(-y[:, :, 0])) * y[:, :, 1]
    y = y.flatten(1)[:, :out_features]
    return y if added is None else added.double() + y


def multiply_densely(
    x: Tensor, weight: Tensor, gated: bool, eps: float | None, added: Tensor | None
) -> Tensor:
    """Compute the same from dense weights, one torch operation at a time."""
    if eps is not None:
        x = functional.rms_norm(x, x.shape[1:], eps=eps)
    y = functional.linear(x, weight)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    return y if added is None else added + y

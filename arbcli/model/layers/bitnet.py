"""Norms of BitNet b1.58, whose results are rounded to int8 by row before they are multiplied.

q = clip(round(y * s), -128, 127) with s = 127 / max |y| of the row, and the next layer reads q / s.
The gradient ignores the rounding.

Source: S. Ma et al., "BitNet b1.58 2B4T Technical Report", https://arxiv.org/abs/2504.12285, and
integrations/bitnet.py of Transformers, `ActQuant`.
"""

import torch
from torch import Tensor

from arbcli.model.layers.gained_norm import GainedRMSNorm

MIN_PEAK = 1e-5
"""Least magnitude of a row's largest number, and least scale of weights."""


def round_rows(y: Tensor) -> Tensor:
    """Round (..., D) to 255 levels of each row; of the same dtype."""
    scale = 127 / y.abs().amax(dim=-1, keepdim=True).float().clamp_(min=MIN_PEAK)
    return (y * scale).round_().clamp_(-128, 127).div_(scale).to(y.dtype)


class RoundedRMSNorm(GainedRMSNorm):
    """RMS norm with trained gains, whose result is rounded: see `round_rows`."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D), and round it; not differentiable."""
        return round_rows(super().forward(x))

    @torch.no_grad()
    def add_and_norm(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, (..., D), and the rounded norm of the sum; not differentiable."""
        total, y = super().add_and_norm(x, added)
        return total, round_rows(y)

    def backward(
        self, grad_y: Tensor, x: Tensor, other_grad: Tensor | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x plus `other_grad`, and the rounded output: (M, D) each."""
        grad_x, y = super().backward(grad_y, x, other_grad)
        return grad_x, round_rows(y)


class RoundedGate(RoundedRMSNorm):
    """relu(gate)**2 * up of a gated MLP, normalised with trained gains, and rounded."""

    @torch.no_grad()
    def forward(self, gate_up: Tensor) -> Tensor:
        """Compute (..., D) from gate and up, the halves of (..., 2 D); not differentiable."""
        gate, up = gate_up.chunk(2, dim=-1)
        return super().forward(gate.relu().square_().mul_(up))

    def backward(
        self, grad_y: Tensor, x: Tensor, other_grad: Tensor | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of gate and up, (M, 2 D), and recompute the output, (M, D)."""
        gate, up = x.chunk(2, dim=-1)
        gate = gate.relu()
        squares = gate.square()
        grad, y = super().backward(grad_y, squares * up)
        return torch.cat([(gate * up).mul_(grad).mul_(2), squares.mul_(grad)], dim=-1), y

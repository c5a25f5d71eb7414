"""Several residual streams in plain PyTorch, for Transformers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from arbcli.interop.huggingface.modeling_core import Packed, PartSpec, norm, vector, wide

ROUNDS = 20
LIMIT = 16.0
SLACK = 2.0**-21


class HyperConnection(nn.Module):
    """Turns streams X into B X + c F(a X), where F is a branch of a block."""

    def __init__(self, streams: int, spec: PartSpec) -> None:
        super().__init__()
        self.sizes = streams, streams, streams * streams
        self.projection = Packed(sum(self.sizes), streams * spec.dim, spec)
        self.bias = vector(sum(self.sizes))

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Mix streams, (T, n, D), around a branch."""
        z = wide(self.projection(norm(x.flatten(1)))) + wide(self.bias)
        a, c, b = z.split(self.sizes, dim=1)
        a, c = torch.sigmoid(a), 2 * torch.sigmoid(c - 2)
        b = doubly_stochastic(b.view(len(x), x.shape[1], -1))
        streams = wide(x)
        y = wide(branch((a[..., None] * streams).sum(dim=1).to(x.dtype)))
        return (b @ streams + c[..., None] * y[:, None]).to(x.dtype)


def doubly_stochastic(z: Tensor) -> Tensor:
    """Make all rows and columns of the exponentials of (T, n, n) add up to 1.

    After some rounds, rows above 1 are divided by their sums, and the deficits are filled up.
    """
    b = torch.exp(z.clamp(-LIMIT, LIMIT))
    for _ in range(ROUNDS):
        b = b / b.sum(dim=2, keepdim=True)
        b = b / b.sum(dim=1, keepdim=True)
    b = b / b.sum(dim=2, keepdim=True).clamp(min=1)
    rows, columns = ((1 - b.sum(dim, keepdim=True)).clamp(min=0) for dim in (2, 1))
    return b + rows * columns / (rows.sum(dim=1, keepdim=True) + SLACK)

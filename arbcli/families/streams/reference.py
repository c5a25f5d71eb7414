"""Hyper-connections: a branch reads and writes several residual streams."""

from collections.abc import Callable

import torch
from torch import Tensor

from arbcli.verify.parts.base import Weights, norm

ROUNDS = 20
LIMIT = 16.0
SLACK = 2.0**-21


def hyper_connection(w: Weights, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """Turn streams X, (T, n, D), into B X + c F(a X), where F is the branch."""
    n, flat = x.shape[1], x.flatten(1)
    z = norm(flat, w.get("norm")) @ w["projection"].T + w["bias"][:, 0]
    a_logits, c_logits, b_logits = z.split((n, n, n * n), dim=1)
    a, c = torch.sigmoid(a_logits), 2 * torch.sigmoid(c_logits - 2)
    b = doubly_stochastic(b_logits.view(-1, n, n))
    f = branch((a[..., None] * x).sum(dim=1))
    return b @ x + c[..., None] * f[:, None]


def doubly_stochastic(z: Tensor) -> Tensor:
    """Make all rows and columns of the exponentials of (T, n, n) add up to 1.

    After some rounds, rows above 1 are divided by their sums, and what is missing is filled up.
    """
    b = torch.exp(z.clamp(-LIMIT, LIMIT))
    for _ in range(ROUNDS):
        b = b / b.sum(dim=2, keepdim=True)
        b = b / b.sum(dim=1, keepdim=True)
    b = b / b.sum(dim=2, keepdim=True).clamp(min=1)
    rows, columns = ((1 - b.sum(dim, keepdim=True)).clamp(min=0) for dim in (2, 1))
    return b + rows * columns / (rows.sum(dim=1, keepdim=True) + SLACK)

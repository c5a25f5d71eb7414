"""Cross-entropy, and KL divergence from a teacher's predictions."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.kernels.output.cross_entropy import cross_entropy as losses_of_rows
from arbcli.kernels.output.cross_entropy import cross_entropy_backward
from arbcli.kernels.runtime.backend import row_chunks

ELEMENTS_AT_ONCE = 1 << 22
"""Maximum number of logits that a divergence converts to float32 at once."""


class _CrossEntropy(Function):
    """Mean loss over rows; the backward recomputes the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return losses_of_rows(logits, targets).mean()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets = ctx.saved_tensors
        return cross_entropy_backward(logits, targets, grad_loss), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy of (M, V) logits and (M,) int64 targets, in nats."""
    return _CrossEntropy.apply(logits, targets)


class _Divergence(Function):
    """Divergence of each row; the backward recomputes the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, theirs: Tensor) -> Tensor:
        totals = [torch.empty(len(logits), device=logits.device) for _ in range(2)]
        for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
            for total, of in zip(totals, (logits, theirs), strict=True):
                total[rows] = of[rows].float().logsumexp(dim=1)
        total, their_total = totals
        ctx.save_for_backward(logits, theirs, total, their_total)
        divergences = total - their_total
        add_divergence_(divergences, logits, theirs, their_total)
        return divergences

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, theirs, total, their_total = ctx.saved_tensors
        logits = logits.clone()
        grade_divergence_(logits, theirs, total, their_total, grad)
        return logits, None


def divergence(logits: Tensor, theirs: Tensor) -> Tensor:
    """Compute the KL divergence of each row from the teacher's distribution, in nats.

    Sum over the symbols of p (log p - log q), with p = softmax(theirs) and q = softmax(logits).
    Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015.

    Args:
        logits: (M, V) float32 or bfloat16.
        theirs: (M, V), the teacher's logits, which get no gradient.

    Returns:
        (M,) float32.
    """
    return _Divergence.apply(logits, theirs)


def add_divergence_(
    divergences: Tensor, logits: Tensor, theirs: Tensor, their_total: Tensor
) -> None:
    """Add the contribution of a chunk of symbols to divergences: sum of p (theirs - logits).

    Args:
        divergences: (M,) float32, updated in place.
        logits: (M, N).
        theirs: (M, N), the teacher's logits.
        their_total: (M,) float32, log-sum-exp of the teacher's logits over all symbols.
    """
    for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
        other = theirs[rows].float()
        shares = (other - their_total[rows, None]).exp_()
        divergences[rows] += shares.mul_(other - logits[rows]).sum(dim=1)


def grade_divergence_(
    logits: Tensor, theirs: Tensor, total: Tensor, their_total: Tensor, scale: Tensor
) -> None:
    """Replace the logits of a chunk of symbols by the gradients of scaled divergences, in place.

    Args:
        logits: (M, N).
        theirs: (M, N), the teacher's logits.
        total: (M,) float32, log-sum-exp of the logits over all symbols.
        their_total: (M,) float32, log-sum-exp of the teacher's logits.
        scale: (M,) float32, gradient of each row's divergence.
    """
    for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
        shares = (logits[rows].float() - total[rows, None]).exp_()
        shares -= (theirs[rows].float() - their_total[rows, None]).exp_()
        logits[rows] = shares.mul_(scale[rows, None])

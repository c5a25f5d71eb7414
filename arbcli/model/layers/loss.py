"""The cross-entropy of bytes, and the divergence from what a teacher predicts."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.kernels.output.cross_entropy import cross_entropy as losses_of_rows
from arbcli.kernels.output.cross_entropy import cross_entropy_backward
from arbcli.kernels.runtime.backend import row_chunks

ELEMENTS_AT_ONCE = 1 << 22
"""Logits of a divergence that are float32 at once."""


class _CrossEntropy(Function):
    """Mean loss of all rows; the backward computes the probabilities again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return losses_of_rows(logits, targets).mean()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets = ctx.saved_tensors
        return cross_entropy_backward(logits, targets, grad_loss / len(logits)), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy of (M, V) logits and (M,) int64 targets: nats, float32 scalar."""
    return _CrossEntropy.apply(logits, targets)


class _Divergence(Function):
    """Divergence of each row; the backward computes the probabilities again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, theirs: Tensor) -> Tensor:
        totals = [torch.empty(len(logits), device=logits.device) for _ in range(2)]
        for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
            for total, of in zip(totals, (logits, theirs), strict=True):
                total[rows] = of[rows].float().logsumexp(dim=1)
        total, their_total = totals
        ctx.save_for_backward(logits, theirs, total, their_total)
        found = total - their_total
        add_divergence_(found, logits, theirs, their_total)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, theirs, total, their_total = ctx.saved_tensors
        logits = logits.clone()
        grade_divergence_(logits, theirs, total, their_total, grad)
        return logits, None


def divergence(logits: Tensor, theirs: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence of each row from a teacher's, in nats.

    Sum over the symbols of p (log p - log q), p being the softmax of `theirs`, q that of `logits`.
    Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015.

    Args:
        logits: (M, V) float32 or bfloat16.
        theirs: (M, V), of the teacher, through which no gradient passes.

    Returns:
        (M,) float32.
    """
    return _Divergence.apply(logits, theirs)


def add_divergence_(found: Tensor, logits: Tensor, theirs: Tensor, their_total: Tensor) -> None:
    """Add what some symbols make of the divergence but for totals: sum of p (theirs - logits).

    Args:
        found: (M,) float32, added to in place.
        logits: (M, N).
        theirs: (M, N), of the teacher.
        their_total: (M,) float32, logarithms of the sums of the exponentials of all of `theirs`.
    """
    for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
        other = theirs[rows].float()
        shares = (other - their_total[rows, None]).exp_()
        found[rows] += shares.mul_(other - logits[rows]).sum(dim=1)


def grade_divergence_(
    logits: Tensor, theirs: Tensor, total: Tensor, their_total: Tensor, scale: Tensor
) -> None:
    """Turn logits of some symbols into the gradient of scaled divergences, in place.

    Args:
        logits: (M, N).
        theirs: (M, N), of the teacher.
        total: (M,) float32, logarithms of the sums of the exponentials of all logits of a row.
        their_total: (M,) float32, those of the teacher.
        scale: (M,) float32, of each row's divergence.
    """
    for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
        shares = (logits[rows].float() - total[rows, None]).exp_()
        shares -= (theirs[rows].float() - their_total[rows, None]).exp_()
        logits[rows] = shares.mul_(scale[rows, None])

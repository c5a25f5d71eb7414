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
    def forward(ctx: Any, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        totals = [torch.empty(len(logits), device=logits.device) for _ in range(2)]
        for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
            for total, source in zip(totals, (logits, teacher_logits), strict=True):
                total[rows] = source[rows].float().logsumexp(dim=1)
        total, teacher_total = totals
        ctx.save_for_backward(logits, teacher_logits, total, teacher_total)
        divergences = total - teacher_total
        add_divergence_(divergences, logits, teacher_logits, teacher_total)
        return divergences

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher_logits, total, teacher_total = ctx.saved_tensors
        logits = logits.clone()
        grade_divergence_(logits, teacher_logits, total, teacher_total, grad)
        return logits, None


def divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute the KL divergence of each row from the teacher's distribution, in nats.

    Sum over the symbols of p (log p - log q), p and q the softmax of `teacher_logits` and `logits`.
    Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015.

    Args:
        logits: (M, V) float32 or bfloat16.
        teacher_logits: (M, V), the teacher's logits, which get no gradient.

    Returns:
        (M,) float32.
    """
    return _Divergence.apply(logits, teacher_logits)


def add_divergence_(
    divergences: Tensor, logits: Tensor, teacher_logits: Tensor, teacher_total: Tensor
) -> None:
    """Add the contribution of a chunk of symbols to divergences, p (teacher_logits - logits).

    Args:
        divergences: (M,) float32, updated in place.
        logits: (M, N).
        teacher_logits: (M, N), the teacher's logits.
        teacher_total: (M,) float32, log-sum-exp of the teacher's logits over all symbols.
    """
    for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
        teacher_chunk = teacher_logits[rows].float()
        shares = (teacher_chunk - teacher_total[rows, None]).exp_()
        divergences[rows] += shares.mul_(teacher_chunk - logits[rows]).sum(dim=1)


def grade_divergence_(
    logits: Tensor, teacher_logits: Tensor, total: Tensor, teacher_total: Tensor, scale: Tensor
) -> None:
    """Replace the logits of a chunk of symbols by the gradients of scaled divergences, in place.

    Args:
        logits: (M, N).
        teacher_logits: (M, N), the teacher's logits.
        total: (M,) float32, log-sum-exp of the logits over all symbols.
        teacher_total: (M,) float32, log-sum-exp of the teacher's logits.
        scale: (M,) float32, gradient of each row's divergence.
    """
    for rows in row_chunks(logits, ELEMENTS_AT_ONCE):
        shares = (logits[rows].float() - total[rows, None]).exp_()
        shares -= (teacher_logits[rows].float() - teacher_total[rows, None]).exp_()
        logits[rows] = shares.mul_(scale[rows, None])

"""The cross-entropy of bytes."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from arbcli.kernels.output.cross_entropy import cross_entropy as losses_of_rows
from arbcli.kernels.output.cross_entropy import cross_entropy_backward


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

"""The composite head: one head each for text, sounds and pictures, mixed by a gate.

    p(b | x) = sum over kinds k of g_k p_k(b);   p_k = softmax(H_k n(x)),   g = softmax(G n(x))

The loss of the next byte is that of the mixture, so generation and evaluation need not know its
kind. Training does: the mean cross-entropy of p_k over the bytes of kind k is the auxiliary loss
`of_text`, `of_sound` or `of_picture`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.media.config import BYTES, KINDS, CompositeConfig
from arbcli.model.layers.kinds import linear_head


class Heads(NamedTuple):
    """Log-probabilities of the next byte for a stream, (B, T, D)."""

    logits: Tensor
    """(B, T, 256) in the dtype of the stream, log-probabilities of the mixture."""
    kind_logs: Tensor
    """(B, T, kinds, 256) float32, log-probabilities of each head."""


class CompositeHead(nn.Module):
    """Predicts the next byte by a mixture of heads."""

    draws = ("heads", "gate")

    def __init__(self, _config: CompositeConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.heads = linear_head(len(KINDS) * BYTES, spec, area="head")
        self.gate = linear_head(len(KINDS), spec, area="head")

    def forward(self, x: Tensor, norm: nn.Module) -> Heads:
        """Compute log-probabilities from norm(x), with x (B, T, D)."""
        kind_logs = (
            self.heads(x, norm).unflatten(-1, (len(KINDS), BYTES)).float().log_softmax(dim=-1)
        )
        shares = self.gate(x, norm).float().log_softmax(dim=-1)
        return Heads(torch.logsumexp(kind_logs + shares[..., None], dim=-2).to(x.dtype), kind_logs)

    def next_losses(
        self, x: Tensor, norm: nn.Module, targets: Tensor, cross_entropy: Callable
    ) -> dict[str, Tensor]:
        """Compute the loss of the next byte, and of each head over the bytes of its kind.

        Args:
            x: (B, T, D), the stream.
            norm: norm before the heads.
            targets: (B, T) int64 bytes, with 256 added for each number of a kind.
            cross_entropy: mean cross-entropy of (N, 256) logits and (N,) targets.

        Returns:
            `text`, and `of_text` and so on, scalars in nats per byte; 0 for kinds without bytes.
        """
        kinds, targets = targets // BYTES, targets % BYTES
        logits, kind_logs = self(x, norm)
        losses = {"text": cross_entropy(logits.flatten(0, 1), targets.flatten())}
        index = targets[..., None, None].expand(*kind_logs.shape[:-1], 1)
        target_logs = kind_logs.gather(-1, index)[..., 0]
        for number, name in enumerate(KINDS):
            kind_mask = kinds == number
            total = (-target_logs[..., number] * kind_mask).sum()
            losses[f"of_{name}"] = total / kind_mask.sum().clamp(min=1)
        return losses

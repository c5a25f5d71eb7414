"""The composite head: a head for text, sounds and pictures each, and a gate that mixes them.

    p(b | x) = sum over kinds k of g_k p_k(b);   p_k = softmax(H_k n(x)),   g = softmax(G n(x))

The loss of the next byte is that of the mixture, so a text is made and scored as by any other head,
and what kind comes next need not be known. In training it is: the average cross-entropy of p_k over
the bytes of its kind is the loss `of_text`, `of_sound` or `of_picture`, with a weight of its own.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.config.parts.composite import BYTES, KINDS
from arbcli.config.site import Site
from arbcli.model.layers.kinds import linear_head


class Heads(NamedTuple):
    """Result for a stream of (B, T, D)."""

    logits: Tensor
    """(B, T, 256) of the next byte, like the stream; they are logarithms of probabilities."""
    each: Tensor
    """(B, T, kinds, 256) float32, those of each head."""


class CompositeHead(nn.Module):
    """Predict the next byte by each head, and by all of them."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.heads = linear_head(len(KINDS) * BYTES, site, area="head")
        self.gate = linear_head(len(KINDS), site, area="head")

    def forward(self, x: Tensor, norm: nn.Module) -> Heads:
        """Compute the logits of (B, T, D), which is normalised by `norm` first."""
        each = self.heads(x, norm).unflatten(-1, (len(KINDS), BYTES)).float().log_softmax(dim=-1)
        shares = self.gate(x, norm).float().log_softmax(dim=-1)
        return Heads(torch.logsumexp(each + shares[..., None], dim=-2).to(x.dtype), each)

    @staticmethod
    def losses(each: Tensor, targets: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        """Average the cross-entropy of each head over the bytes of its kind.

        Args:
            each: of `Heads`.
            targets: (B, T) int64 bytes.
            kinds: (B, T) int64 numbers of `KINDS`.

        Returns:
            Float32 scalars in nats a byte, 0 where there are none of a kind.
        """
        of_target = each.gather(-1, targets[..., None, None].expand(*each.shape[:-1], 1))[..., 0]
        losses = {}
        for number, name in enumerate(KINDS):
            own = kinds == number
            total = -(of_target[..., number] * own).sum()
            losses[f"of_{name}"] = total / own.sum().clamp(min=1)
        return losses

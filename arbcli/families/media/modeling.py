"""The composite head in plain PyTorch, for Transformers."""

import torch
from torch import Tensor, nn

from arbcli.interop.huggingface.modeling_core import Packed, Site

KINDS, BYTES = 3, 256


class CompositeHead(nn.Module):
    """Mixes the predictions of heads for text, sounds and pictures by a gate."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.heads = Packed(KINDS * BYTES, site.dim, site)
        self.gate = Packed(KINDS, site.dim, site)

    def forward(self, x: Tensor) -> Tensor:
        """Compute log-probabilities of the mixture, (T, 256), from the normalised stream."""
        by_kind = self.heads(x).view(len(x), KINDS, BYTES).float().log_softmax(dim=-1)
        shares = self.gate(x).float().log_softmax(dim=-1)
        return torch.logsumexp(by_kind + shares[..., None], dim=1).to(x.dtype)

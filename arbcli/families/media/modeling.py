"""The composite head in plain PyTorch, for Transformers."""

import torch
from torch import Tensor, nn

from arbcli.interop.huggingface.modeling_core import Packed, PartSpec, wide

KINDS, BYTES = 3, 256


class CompositeHead(nn.Module):
    """Mixes the predictions of heads for text, sounds and pictures by a gate."""

    def __init__(self, spec: PartSpec) -> None:
        super().__init__()
        self.heads = Packed(KINDS * BYTES, spec.dim, spec)
        self.gate = Packed(KINDS, spec.dim, spec)

    def forward(self, x: Tensor) -> Tensor:
        """Compute log-probabilities of the mixture, (T, 256), from the normalised stream."""
        shares = wide(self.gate(x)).log_softmax(dim=-1)
        return torch.logsumexp(self.kind_log_probabilities(x) + shares[..., None], dim=1).to(
            x.dtype
        )

    def kind_log_probabilities(self, x: Tensor) -> Tensor:
        """Compute the log-probabilities of each head, (T, 3, 256)."""
        return wide(self.heads(x)).view(len(x), KINDS, BYTES).log_softmax(dim=-1)

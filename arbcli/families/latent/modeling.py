"""Multi-head latent attention in plain PyTorch, for Transformers."""

import torch
from torch import Tensor, nn

from arbcli.interop.huggingface.modeling_core import (
    Packed,
    PartSpec,
    Reading,
    Settings,
    attention_shares,
    mixed,
    norm,
    rotate,
    sees_last,
)

SHARPNESS = 2.0


class LatentAttention(nn.Module):
    """Attention whose keys and values are made from a latent vector."""

    name = "attention"

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.heads, self.width = part["heads"], spec.dim // part["heads"]
        self.still, self.ctx, self.causal = self.width - part["rotary"], spec.ctx, spec.causal
        self.sizes = spec.dim, part["latent"], part["rotary"]
        self.sub_norm = part["sub_norm"]
        self.query_down = Packed(sum(self.sizes), spec.dim, spec)
        self.up = Packed(self.heads * (self.still + self.width), part["latent"], spec)
        self.output = Packed(spec.dim, spec.dim, spec)

    def forward(self, _x: Tensor, h: Tensor, _reading: Reading) -> Tensor:
        """Attend over the normalised stream, (T, D)."""
        position_ids, still = torch.arange(len(h)), self.still
        q, latent, key = self.query_down(h).split(self.sizes, dim=1)
        q = q.view(len(h), self.heads, -1)
        q = norm(torch.cat((q[..., :still], rotate(q[..., still:], position_ids)), dim=-1))
        up = self.up(norm(latent)).view(len(h), self.heads, -1)
        key = rotate(key, position_ids)[:, None].expand(-1, self.heads, -1)
        k, v = norm(torch.cat((up[..., :still], key), dim=-1)), up[..., still:]
        sees = sees_last(len(h), self.ctx, h.device, causal=self.causal)
        y = mixed(attention_shares(q, k, sees, SHARPNESS * self.width**-0.5), v)
        return self.output(norm(y) if self.sub_norm else y)

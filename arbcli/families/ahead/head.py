"""Multi-byte prediction: a head for the bytes after the next one.

With s_0 the stream of a position after the last block, and b_1, b_2, .. the bytes that follow the
position, of which the model's main head predicts b_1, for k = 1, 2, ..:

    (1) x_k = n(s_{k-1}) P^T + E[b_k]
    (2) s_k = x_k + mlp(n(x_k))
    (3) n(s_k) H^T = logits of b_{k+1}

n is an RMS norm; P, E, H and the weights of the MLP are shared by all k. The loss `next_{k+1}` is
the mean cross-entropy of (3) over the positions with enough bytes after them in the window. In
training the b_k are those of the text (teacher forcing); in generation they are sampled from (3).
"""

from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.mlp import MLPConfig
from arbcli.families.ahead.config import BYTES, AheadConfig
from arbcli.model.layers.kinds import layers_for, linear_head, stream_norm
from arbcli.model.parts.base import project
from arbcli.model.parts.mlp import MLP


class Ahead(nn.Module):
    """Predicts bytes after the next one, autoregressively."""

    draws = ("norm", "carry", "embedding", "mlp_norm", "mlp", "head_norm", "head")

    def __init__(self, config: AheadConfig, spec: LayerSpec) -> None:
        super().__init__()
        parts, dim, self.config = layers_for(spec), spec.dim, config
        self.cross_entropy = parts.cross_entropy
        self.norm = stream_norm(spec)
        self.carry = parts.linear(dim, dim, spec, area="ahead")
        self.embedding = parts.embedding(BYTES, dim, spec, area="ahead")
        self.mlp_norm = stream_norm(spec)
        self.mlp = MLP(MLPConfig(width=config.width), spec, area="ahead")
        self.head_norm = stream_norm(spec)
        self.head = linear_head(BYTES, spec, area="ahead")

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (1) to (3) for one more byte.

        Args:
            x: (B, T, D), s_{k-1} of each position.
            ids: (B, T) int64, b_k of each position.

        Returns:
            s_k, (B, T, D), and logits of b_{k+1}, (B, T, 256).
        """
        carried, _ = project(self.carry, x, self.norm, None)
        x = carried + self.embedding(ids, x.dtype)
        x = self.mlp(x, self.mlp_norm).total()
        logits, _ = project(self.head, x, self.head_norm, None)
        return x, logits

    def step(self, x: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (1) to (3) for one position, (1, 1, D), with fused kernels."""
        carried = self.carry.fused(x, normalise=True, added=self.embedding(byte, x.dtype))
        x = self.mlp.step(carried, None, carried)
        return x, self.head.fused(x, normalise=True)

    def losses(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Compute the mean cross-entropy of each byte after the next one.

        Args:
            x: (B, T, D), the stream after the last block.
            ids: (B, T) int64, the bytes of the window.

        Returns:
            Float32 scalars in nats per byte, by the names of `AheadConfig.losses`; losses for which
            the window is too short are left out.
        """
        losses, length = {}, ids.shape[1] - 1
        for k, name in enumerate(self.config.losses[: max(0, length - 1)], 1):
            x, logits = self(x[:, : length - k], ids[:, k:length])
            losses[name] = self.cross_entropy(logits.flatten(0, 1), ids[:, k + 1 :].flatten())
        return losses

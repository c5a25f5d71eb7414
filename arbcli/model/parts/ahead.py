"""The head that predicts bytes beyond the next one.

With s_0 the stream of a position after the last block, and b_1, b_2, .. the bytes that follow the
position, of which the model's own head predicts b_1, for k = 1, 2, ..:

    (1) x_k = n(s_{k-1}) P^T + E[b_k]
    (2) s_k = x_k + mlp(n(x_k))
    (3) n(s_k) H^T = logits of b_{k+1}

n divides by the root-mean-square; P, E, H and the weights of the MLP are the same for all k. The
average cross-entropy of (3) over the positions that have so many bytes after them in the window
is the loss `next_{k+1}`. In training the b_k are those of the text; when a text is made, they are
what (3) proposed.
"""

from torch import Tensor, nn

from arbcli.config.parts.ahead import BYTES, AheadConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.site import Site
from arbcli.model.flow import project
from arbcli.model.layers.kinds import layers_for, linear_head, stream_norm
from arbcli.model.parts.mlp import MLP


class Ahead(nn.Module):
    """Predict the bytes beyond the next one, each from those before it."""

    def __init__(self, config: AheadConfig, site: Site) -> None:
        super().__init__()
        parts, dim, self.config = layers_for(site), site.dim, config
        self.cross_entropy = parts.cross_entropy
        self.norm = stream_norm(site)
        self.carry = parts.linear(dim, dim, site, area="ahead")
        self.embedding = parts.embedding(BYTES, dim, site, area="ahead")
        self.mlp_norm = stream_norm(site)
        self.mlp = MLP(MLPConfig(width=config.width), site, area="ahead")
        self.head_norm = stream_norm(site)
        self.head = linear_head(BYTES, site, area="ahead")

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Go on by a byte: (1) to (3).

        Args:
            x: (B, T, D), s_{k-1} of each position.
            ids: (B, T) int64, b_k of each.

        Returns:
            s_k like x, and (B, T, 256) logits of b_{k+1}.
        """
        carried, _ = project(self.carry, x, self.norm, None)
        x = carried + self.embedding(ids, x.dtype)
        x = self.mlp(x, self.mlp_norm).total()
        logits, _ = project(self.head, x, self.head_norm, None)
        return x, logits

    def step(self, x: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
        """Go on by a byte of one text, (1, 1, D), by kernels for a row."""
        carried = self.carry.fused(x, normalise=True, added=self.embedding(byte, x.dtype))
        x = self.mlp.step(carried)
        return x, self.head.fused(x, normalise=True)

    def losses(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Average the cross-entropy of each byte beyond the next one.

        Args:
            x: (B, T, D), the stream after the last block.
            ids: (B, T) int64, the bytes of the window.

        Returns:
            Float32 scalars in nats a byte by the names of `AheadConfig.losses`; of a window that is
            too short for some, the others.
        """
        losses, length = {}, ids.shape[1] - 1
        for k, name in enumerate(self.config.losses[: max(0, length - 1)], 1):
            x, logits = self(x[:, : length - k], ids[:, k:length])
            losses[name] = self.cross_entropy(logits.flatten(0, 1), ids[:, k + 1 :].flatten())
        return losses

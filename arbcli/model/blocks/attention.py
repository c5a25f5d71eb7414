"""Attention of a dense block: fused projections, rotary positions, normalised queries and keys."""

from torch import Tensor, nn

from arbcli.config.dense import ModelConfig
from arbcli.model.blocks.window import attend_in_window
from arbcli.model.cache import BlockCache, CachedAttention, SeveralBlock
from arbcli.model.initial import output_std
from arbcli.model.layers.attend import attend_causally
from arbcli.model.layers.kinds import layers_for


class Attention(CachedAttention):
    """Causal self-attention over rotary positions, with normalised queries and keys.

    Args:
        config: of the block.
        window: positions that each one attends to, itself one of them; None is all before it.
    """

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__()
        parts, self.window = layers_for(config), window
        self.heads, self.rotary_norm = config.heads, parts.rotary_norm
        self.qkv = parts.linear(3 * config.dim, config.dim, config, area="attention")
        self.sub_norm = parts.norm(config.dim, config) if config.sub_norms else None
        std = output_std(config.dim, config.layers)
        self.output = parts.linear(config.dim, config.dim, config, area="attention", std=std)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None,
        past: BlockCache | None = None,
        added: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise (B, T, D) and mix every position with those before it, and with the past.

        Without a norm, x was normalised before. What is `added` to it comes first, and then the sum
        is returned, too.
        """
        if added is None:
            return self._mix(self.qkv(x, norm), past)
        qkv, x = self.qkv(x, norm, added)
        return self._mix(qkv, past), x

    def _mix(self, qkv: Tensor, past: BlockCache | None) -> Tensor:
        batch, length, dim = *qkv.shape[:2], qkv.shape[2] // 3
        qkv = qkv.view(batch, length, 3, self.heads, dim // self.heads)
        if past is None:
            q, k, v = self.rotary_norm(qkv)  # (B, heads, T, head_dim) each
            k, v = self.as_stored(k, v)
            if self.window is None or self.window >= length:
                y = attend_causally(q, k, v)
            else:
                y = attend_in_window(q, k, v, self.window)
        elif length == 1:
            y = past.attend_one(qkv)
        else:
            y = past.attend(*self.rotary_norm(qkv, past.angles))
        return self.output(y.transpose(1, 2).reshape(batch, length, dim), self.sub_norm)

    def one_position(self, x: Tensor, past: BlockCache | SeveralBlock) -> Tensor:
        """Normalise one position of the stream, mix it with the past, and add that to it."""
        qkv = self.qkv.fused(x, normalise=True).view(len(x), 1, 3, self.heads, -1)
        if self.output.takes_parts and past.leaves_parts(qkv):
            y = past.attend_in_parts(qkv)
        else:
            y = past.attend_one(qkv).view(x.shape)
        return self.output.fused(y, normalise=self.sub_norm is not None, added=x)

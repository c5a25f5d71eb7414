"""The gated MLP of a block."""

from torch import Tensor, nn

from arbcli.config.dense import ModelConfig
from arbcli.model.initial import output_std
from arbcli.model.layers.kinds import layers_for


class MLP(nn.Module):
    """Gated MLP: down(norm(silu(gate) * up))."""

    def __init__(self, config: ModelConfig, ffn: int | None = None, area: str = "mlp") -> None:
        super().__init__()
        parts, ffn = layers_for(config), ffn or config.ffn
        self.gate_up = parts.linear(2 * ffn, config.dim, config, area=area)
        self.sub_norm = parts.gate(ffn, config, normalise=config.sub_norms)
        std = output_std(ffn, config.layers)
        self.output = parts.linear(config.dim, ffn, config, area=area, std=std)

    def forward(
        self, x: Tensor, norm: nn.Module | None, added: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise as `Attention` does, and transform every position of (B, T, D) by itself."""
        if added is None:
            return self.output(self.gate_up(x, norm), self.sub_norm, consumes=True)
        hidden, x = self.gate_up(x, norm, added)
        return self.output(hidden, self.sub_norm, consumes=True), x

    def one_position(self, x: Tensor) -> Tensor:
        """Normalise one position of the stream, transform it, and add that to it."""
        hidden = self.gate_up.fused(x, normalise=True, gated=True)
        return self.output.fused(hidden, normalise=self.sub_norm.weight is not None, added=x)

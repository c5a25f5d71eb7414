"""The gated MLP of a block."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.mlp import MLPConfig
from arbcli.model.layers.kinds import layers_for
from arbcli.model.parts.base import BlockInputs, BlockOutput, Part, fits_vectors, project

if TYPE_CHECKING:
    from arbcli.model.state import PositionCounter


class MLP(Part):
    """Gated MLP: down(norm(silu(gate) * up)), or of BitNet down(norm(relu(gate)**2 * up))."""

    draws = ("gate_up", "sub_norm", "output")
    name = "mlp"
    speculates = True
    steps_positions = True
    ends_with_product = True

    def __init__(self, config: MLPConfig, spec: LayerSpec, area: str = "mlp") -> None:
        super().__init__()
        parts, width = layers_for(spec), config.width
        self.gate_up = parts.linear(2 * width, spec.dim, spec, area=area)
        if config.bitnet:
            self.sub_norm = parts.rounded_gate(width, spec)
        else:
            self.sub_norm = parts.gate(width, spec, normalise=config.sub_norm)
        self.output = parts.output(width, spec, area=area)
        self.steps_fused = fits_vectors(width)

    def new_state(self, clock: "PositionCounter") -> None:
        """Return None, as positions are independent."""

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: None = None,
    ) -> BlockOutput:
        """Apply the MLP to (B, T, D): see `Part.forward`."""
        hidden, x = project(self.gate_up, x, norm, added)
        return BlockOutput(x, self.output(hidden, self.sub_norm, consumes=True))

    def step(self, x: Tensor, state: None, residual: Tensor | None) -> Tensor:
        """Apply the MLP in a decoding step: see `Part.step`."""
        hidden = self.gate_up.fused(x, normalise=True, gated=True)
        return self.output.fused(hidden, normalise=self.sub_norm.weight is not None, added=residual)

    def linears(self) -> tuple[nn.Module, ...]:
        """Return both layers."""
        return self.gate_up, self.output

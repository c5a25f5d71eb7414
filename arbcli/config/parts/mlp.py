"""Gated MLP."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.base import PartConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig(PartConfig):
    """A gated MLP with SiLU."""

    module: ClassVar[str] = "arbcli.model.parts.mlp:MLP"
    code: ClassVar[str] = "arbcli.interop.huggingface.modeling_core:MLP"
    kind: str = field(default="mlp", init=False)
    across: ClassVar[str | None] = None
    causal: ClassVar[str | None] = None
    width: int
    """Width of the hidden layer."""
    sub_norm: bool = True
    """Whether a norm precedes the output projection."""
    bitnet: bool = False
    """Whether the part computes as BitNet b1.58: as in attention, and relu(gate)**2 takes the place
    of silu(gate)."""

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return 3 * spec.dim * self.width

    def reach(self, spec: LayerSpec) -> int:
        """Return 0, as positions are independent."""
        return 0

    def saved_width(self, spec: LayerSpec) -> int:
        """Return the widths of the input, the gate and the product."""
        return spec.dim + 2 * self.width

"""Mamba-2 state space model."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.attention import check_heads
from arbcli.config.parts.base import PartConfig

EXPAND = 2
"""Factor of the inner width over the width of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(PartConfig):
    """Mamba-2 with `EXPAND * heads` heads, each with a state."""

    module: ClassVar[str] = "arbcli.families.mamba.mixer:Mamba"
    code: ClassVar[str] = "arbcli.families.mamba.modeling:Mamba"
    kind: str = field(default="mamba", init=False)
    across: ClassVar[str | None] = "its state goes on from one document to the next"
    causal: ClassVar[str | None] = "its state goes from left to right"
    heads: int
    """Number of heads in the stream's width; `EXPAND * heads` inner heads have the same width."""
    states: int = 64
    """State size per channel."""

    def check_at(self, spec: LayerSpec) -> None:
        """Check that the heads divide the stream; see `PartConfig.check_at`."""
        check_heads(self.heads, spec)

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position, with the scan as a recurrence."""
        inner = EXPAND * spec.dim
        projection = spec.dim * (2 * inner + 2 * self.states + EXPAND * self.heads)
        return projection + inner * spec.dim + 2 * self.states * inner

    def saved_width(self, spec: LayerSpec) -> int:
        """Return the widths of the input and the inner projections."""
        return spec.dim + 2 * EXPAND * spec.dim

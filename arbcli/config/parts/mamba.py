"""Mamba-2, a state space model."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.parts.attention import check_heads
from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site

EXPAND = 2
"""Inner width, over that of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(PartConfig):
    """Mamba-2: `EXPAND` times `heads` heads, each with a state of its own."""

    kind: str = field(default="mamba", init=False)
    across: ClassVar[str | None] = "its state goes on from one document to the next"
    causal: ClassVar[str | None] = "its state goes from left to right"
    heads: int
    """Of the stream's width; there are `EXPAND` times as many inside, of the same width."""
    states: int = 64
    """Numbers of the state for each number of a head."""

    def check_at(self, site: Site) -> None:
        """Check that the heads divide the stream; see `PartConfig.check_at`."""
        check_heads(self.heads, site)

    def head_width(self, site: Site) -> int:
        """Width of a head."""
        return site.dim // self.heads

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position, of the scan as a recurrence."""
        inner = EXPAND * site.dim
        projection = site.dim * (2 * inner + 2 * self.states + EXPAND * self.heads)
        return projection + inner * site.dim + 2 * self.states * inner

    def saved_width(self, site: Site) -> int:
        """Count the input, and the inner projections."""
        return site.dim + 2 * EXPAND * site.dim

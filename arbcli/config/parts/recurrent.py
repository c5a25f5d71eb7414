"""A gated linear recurrence."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.parts.attention import check_heads
from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig(PartConfig):
    """A mean of what came before, with a gate for each head."""

    kind: str = field(default="recurrent", init=False)
    across: ClassVar[str | None] = "its state goes on from one document to the next"
    causal: ClassVar[str | None] = "its state goes from left to right"
    heads: int
    """Number of heads, each with a gate."""

    def check_at(self, site: Site) -> None:
        """Check that the heads divide the stream; see `PartConfig.check_at`."""
        check_heads(self.heads, site)

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position, of the mean as a product with all of them."""
        return site.dim * (3 * site.dim + self.heads + positions)

    def saved_width(self, site: Site) -> int:
        """Count the input and the projection."""
        return 3 * site.dim + self.heads

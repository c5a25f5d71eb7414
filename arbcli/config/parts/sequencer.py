"""Rows of a table that the text's n-grams are hashed to, added to the embedding."""

from dataclasses import dataclass, field

from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencerConfig(PartConfig):
    """A table of n-grams of 2, 3 and 4 bytes."""

    kind: str = field(default="sequencer", init=False)
    rows: int
    width: int
    """Of a row."""

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        return site.dim * self.width

"""Table of hashed n-grams, whose rows are added to the embedding."""

from dataclasses import dataclass, field

from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencerConfig(PartConfig):
    """Table of hashed n-grams of 2, 3 and 4 bytes."""

    kind: str = field(default="sequencer", init=False)
    rows: int
    width: int
    """Width of a row."""

    def products(self, site: Site, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return site.dim * self.width

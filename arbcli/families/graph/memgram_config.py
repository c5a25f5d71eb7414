"""Integer memory of the byte after each n-gram, added to the embedding."""

from dataclasses import dataclass, field

from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class MemGramConfig(PartConfig):
    """A memory of n-grams of 6 bytes."""

    kind: str = field(default="memgram", init=False)
    rows: int = 65536
    """Number of entries."""

    def products(self, site: Site, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return site.dim**2

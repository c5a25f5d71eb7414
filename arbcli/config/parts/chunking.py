"""Chunking: where chunks begin, and how many there may be."""

import math
from dataclasses import dataclass, field

from arbcli.config.checks import check_choice
from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError

BOUNDARIES = ("learned", "every", "space")
"""Where chunks begin: as a router learns, every `length` positions, or after a space."""
SPARE_SLOTS = 1.5
"""Slots for chunks, over those that a text of chunks of `length` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingConfig(PartConfig):
    """How an outer stage cuts its positions into chunks, the positions of the stage inside."""

    kind: str = field(default="chunking", init=False)
    boundaries: str = "learned"
    """One of `BOUNDARIES`."""
    length: int = 4
    """Positions of a chunk on average, which a router is trained towards."""

    def __post_init__(self) -> None:
        """Check types, sizes and names.

        Raises:
            ArbError: a value does not fit.
        """
        PartConfig.__post_init__(self)
        check_choice("boundaries", self.boundaries, BOUNDARIES)
        if self.length < 2:
            raise ArbError(
                f"`chunk_length` is {self.length}",
                hint="use 2 or more",
                fields=("chunk_length",),
            )

    def slots(self, positions: int) -> int:
        """Count the chunks that a window of so many positions may have."""
        # words are as long as they are, whatever `length` says
        share = 1 if self.boundaries == "every" else SPARE_SLOTS
        return math.ceil(positions * share / self.length)

    def products_with(self, site: Site, inner: int, positions: float) -> float:
        """Count the multiplications of a window: router, residual, and the ways in and out.

        Args:
            site: of the outer stage.
            inner: width of the stage inside.
            positions: of a window of the outer stage.
        """
        of_position = site.dim**2 * (3 if self.boundaries == "learned" else 1)
        return positions * of_position + positions / self.length * 2 * site.dim * inner

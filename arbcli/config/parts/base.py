"""The base class of the configurations of parts."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.checks import check_fields, check_sizes
from arbcli.config.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class PartConfig:
    """The shape of a part, which checks itself."""

    kind: str = field(init=False)
    """The name of the kind, as files have it."""
    across: ClassVar[str | None] = "it would pass something from one document to the next"
    """Why a window cannot hold several documents that know nothing of each other; None if it can.
    """
    causal: ClassVar[str | None] = "it reads what is before a position"
    """Why no position can see those after it; None if it can."""

    @property
    def reads_text(self) -> bool:
        """Whether the part reads the bytes of the text besides the stream."""
        return False

    def __post_init__(self) -> None:
        """Check types and sizes.

        Raises:
            ArbError: a value has another type, or a size is out of range.
        """
        check_fields(self)
        check_sizes(self)

    def check_at(self, site: Site) -> None:
        """Check that the part fits the stream.

        Raises:
            ArbError: it does not.
        """

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of matrix products for each position.

        Args:
            site: where the part stands.
            positions: length of a window; attention counts as if each position saw all of it.
        """
        raise NotImplementedError

    def reach(self, site: Site) -> int | None:
        """Count the positions before its own that a position depends on; None is any number."""
        return None

    def saved_width(self, site: Site) -> int:
        """Count the numbers that a training step keeps of each position, at least."""
        return site.dim

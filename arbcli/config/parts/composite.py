"""The head of several kinds of bytes."""

from dataclasses import dataclass, field

from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError

KINDS = ("text", "sound", "picture")
"""Kinds of bytes, each of which has a head."""
BYTES = 256
"""Symbols that a head predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositeConfig(PartConfig):
    """A head for each kind of bytes, mixed for the next byte, and the weight of each one's loss."""

    kind: str = field(default="composite", init=False)
    text: float = 0.1
    """Weight of the loss of this head, 0 to 10, that of the next byte being 1."""
    sound: float = 0.1
    picture: float = 0.1

    def __post_init__(self) -> None:
        """Check numbers.

        Raises:
            ArbError: one is out of range.
        """
        PartConfig.__post_init__(self)
        for name in KINDS:
            if not 0 <= getattr(self, name) <= 10:
                raise ArbError(
                    f"`{name}` is {getattr(self, name)}", hint="use 0 to 10", fields=(name,)
                )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each head's loss, by its name."""
        return {f"of_{name}": getattr(self, name) for name in KINDS}

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        return site.dim * len(KINDS) * (BYTES + 1)

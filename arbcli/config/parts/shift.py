"""Half of each vector from the position before."""

from dataclasses import dataclass, field

from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftConfig(PartConfig):
    """A projection, half of which is taken from the position before."""

    kind: str = field(default="shift", init=False)

    def check_at(self, site: Site) -> None:
        """Check that the stream has halves; see `PartConfig.check_at`."""
        if site.dim % 2:
            raise ArbError(
                f"a stream of {site.dim} has no halves", hint="use an even `dim`", fields=("dim",)
            )

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        return 2 * site.dim**2

    def saved_width(self, site: Site) -> int:
        """Count the input and the projection."""
        return 2 * site.dim

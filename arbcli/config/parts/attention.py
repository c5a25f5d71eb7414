"""Attention to all positions, or to those of a window."""

from dataclasses import dataclass, field

from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError


def check_heads(heads: int, site: Site) -> None:
    """Check that heads divide the stream into even widths.

    Raises:
        ArbError: they do not.
    """
    if site.dim % (2 * heads):
        raise ArbError(
            f"{heads} heads do not divide a width of {site.dim} into even parts",
            hint=f"make `dim` a multiple of {2 * heads}, or choose other `heads`",
            fields=("dim", "heads"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(PartConfig):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    kind: str = field(default="attention", init=False)
    heads: int
    """They divide the width of the stream into even widths."""
    window: int | None = None
    """Positions that each one attends to, itself included; None is all before it."""
    sub_norm: bool = True
    """Whether a norm precedes the output projection."""

    def check_at(self, site: Site) -> None:
        """Check that the heads divide the stream; see `PartConfig.check_at`."""
        check_heads(self.heads, site)

    def head_width(self, site: Site) -> int:
        """Width of a head."""
        return site.dim // self.heads

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        seen = positions if self.window is None else min(self.window, positions)
        return 4 * site.dim**2 + 2 * site.dim * seen

    def saved_width(self, site: Site) -> int:
        """Count the input, queries, keys, values and output."""
        return 5 * site.dim

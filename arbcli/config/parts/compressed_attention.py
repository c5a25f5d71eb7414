"""Attention to entries of several positions, which an indexer may choose."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.checks import check_choice
from arbcli.config.parts.attention import check_even_width, check_heads, check_kv_heads
from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError

WIDEST_HEAD = 512
POOLINGS = ("softmax", "mean")
"""How an entry is made of its positions: a sum weighted by learned gates, or their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionConfig(PartConfig):
    """Causal self-attention to the last positions, and to entries compressed from all before."""

    kind: str = field(default="compressed", init=False)
    across: ClassVar[str | None] = "an entry may hold positions of two documents"
    causal: ClassVar[str | None] = "its entries are of positions before the one that reads them"
    heads: int
    kv_heads: int = 1
    """Heads of keys and values, each of which serves `heads / kv_heads` heads of queries."""
    head_width: int | None = None
    """None is the width of the stream divided by `heads`."""
    rotary: int | None = None
    """Numbers of a head that are rotated by position; None is half of them."""
    window: int = 128
    """Last positions that each one attends to uncompressed, itself included."""
    ratio: int = 4
    """Positions of an entry."""
    pooling: str = "softmax"
    """One of `POOLINGS`."""
    key_gain: bool = False
    """Whether the norm of keys, of positions and of entries, has learned gains."""
    top_k: int | None = None
    """Entries that an indexer chooses; None is all of them, without an indexer."""
    index_heads: int = 4
    index_width: int = 32
    """Width of a head of the indexer."""
    sub_norm: bool = True
    """Whether a norm precedes the output projection."""

    def __post_init__(self) -> None:
        """Check types, sizes, and the widths that are rotated.

        Raises:
            ArbError: a value does not fit.
        """
        PartConfig.__post_init__(self)
        check_choice("pooling", self.pooling, POOLINGS)
        for name in ("head_width", "rotary"):
            check_even_width(name, getattr(self, name))
        check_kv_heads(self.heads, self.kv_heads)
        if self.ratio < 2:
            raise ArbError(
                f"`ratio` is {self.ratio}", hint="use 2 positions or more", fields=("ratio",)
            )
        if self.index_width % 4:
            raise ArbError(
                f"`index_width` is {self.index_width:,}",
                hint="use a multiple of 4, half of which can be rotated",
                fields=("index_width",),
            )

    def check_at(self, site: Site) -> None:
        """Check the width of heads; see `PartConfig.check_at`."""
        if self.head_width is None:
            check_heads(self.heads, site)
        width, rotated = self.width(site), self.rotated(site)
        if width % 2 or rotated > width or width > WIDEST_HEAD:
            raise ArbError(
                f"of {width} numbers of a head, {rotated} cannot be rotated",
                hint=f"use heads of 2 to {WIDEST_HEAD} numbers, of which no more are rotated",
                fields=("head_width", "rotary"),
            )

    def width(self, site: Site) -> int:
        """Width of a head."""
        return self.head_width or site.dim // self.heads

    def rotated(self, site: Site) -> int:
        """Numbers of a head that are rotated by position."""
        return self.rotary or self.width(site) // 4 * 2

    @property
    def vectors(self) -> int:
        """Vectors that are projected of a position for a head of keys: with or without gates."""
        return 3 if self.pooling == "softmax" else 2

    def entries(self, site: Site) -> int:
        """Count the entries that a position can see at most: those of a whole window."""
        return max(1, site.ctx // self.ratio)

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        inner, kv = self.heads * self.width(site), self.kv_heads * self.width(site)
        found: float = site.dim * (2 * inner + self.vectors * kv)
        entries = self.entries(site)
        if self.top_k is not None:
            width = self.index_heads * self.index_width
            of_entry = site.dim * (width + self.index_heads) + kv * self.index_width
            found += (of_entry + width * entries) / self.ratio
            entries = min(entries, self.top_k)
        return found + 2 * inner * (min(self.window, positions) + entries)

    def saved_width(self, site: Site) -> int:
        """Count the stream, queries and outputs of heads."""
        return site.dim + 2 * self.heads * self.width(site)

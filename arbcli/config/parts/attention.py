"""Attention to all positions, or to those of a window."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.checks import check_choice
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError

QUERY_KEY_NORMS = ("unit", "gain", "none")


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


def check_kv_heads(heads: int, kv_heads: int) -> None:
    """Check that each head of keys serves as many heads of queries.

    Raises:
        ArbError: it does not.
    """
    if heads % kv_heads:
        raise ArbError(
            f"{kv_heads} heads of keys do not divide {heads} heads",
            hint="use a divisor",
            fields=("kv_heads", "heads"),
        )


def check_even_width(name: str, value: int | None) -> None:
    """Check that a width can be cut into pairs; None: no width.

    Raises:
        ArbError: it cannot.
    """
    if value is not None and (value < 2 or value % 2):
        raise ArbError(f"`{name}` is {value:,}", hint="use an even number above 0", fields=(name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(PartConfig):
    """Self-attention with rotary positions."""

    kind: str = field(default="attention", init=False)
    across: ClassVar[str | None] = None
    causal: ClassVar[str | None] = None
    heads: int
    """Heads of queries."""
    kv_heads: int | None = None
    """Heads of keys and values, each of which serves `heads / kv_heads` heads of queries; None is
    as many as of queries."""
    head_width: int | None = None
    """None is the width of the stream divided by `heads`."""
    window: int | None = None
    """Positions that each one attends to, itself included; None is all before it. Of a masked
    model there are as many on the other side."""
    rotary: RotaryConfig = PLAIN
    """The angles by which queries and keys turn."""
    query_key_norm: str = "unit"
    """How each head of queries and of keys is normalised before it turns: `unit` divides it by its
    root-mean-square, `gain` multiplies by learned gains besides, `none` leaves it."""
    bias: bool = False
    """Whether queries, keys and values have learned biases."""
    output_bias: bool = False
    """Whether the output projection has one."""
    sink: bool = False
    """Whether each head has a learned logit of a position without a value."""
    sub_norm: bool = True
    """Whether a norm precedes the output projection."""

    def __post_init__(self) -> None:
        """Check types, sizes, names, and that heads of keys divide those of queries.

        Raises:
            ArbError: a value does not fit.
        """
        PartConfig.__post_init__(self)
        check_even_width("head_width", self.head_width)
        check_kv_heads(self.heads, self.key_heads)
        check_choice("query_key_norm", self.query_key_norm, QUERY_KEY_NORMS)

    def check_at(self, site: Site) -> None:
        """Check the widths of heads, and of what turns; see `PartConfig.check_at`."""
        if self.head_width is None:
            check_heads(self.heads, site)
        if self.rotated(site) < 2 or self.rotated(site) % 2:
            raise ArbError(
                f"`share` is {self.rotary.share}, and {self.rotated(site)} of {self.width(site)}"
                " numbers of a head would be rotated",
                hint="choose a share that rotates an even number",
                fields=("share",),
            )

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def width(self, site: Site) -> int:
        """Width of a head."""
        return self.head_width or site.dim // self.heads

    def rotated(self, site: Site) -> int:
        """Numbers of a head that turn."""
        return self.rotary.rotated(self.width(site))

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        seen = positions if self.window is None else min(self.window, positions)
        inner, kv = self.heads * self.width(site), self.key_heads * self.width(site)
        return 2 * site.dim * (inner + kv) + 2 * inner * seen

    def reach(self, site: Site) -> int:
        """Count the positions of the window but for its own."""
        return min(self.window or site.ctx, site.ctx) - 1

    def saved_width(self, site: Site) -> int:
        """Count the input, queries, keys, values and output."""
        return site.dim + 2 * (self.heads + self.key_heads) * self.width(site)

"""Compressed attention to entries of several positions, with an optional indexer."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from arbcli.base.errors import ArbError, setting_error
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.attention import check_even_width, check_heads, check_kv_heads
from arbcli.config.parts.base import PartConfig
from arbcli.config.settings import Setting

WIDEST_HEAD = 512
POOLINGS = ("softmax", "mean")
"""Poolings of positions to an entry: a sum weighted by learned gates, or the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionConfig(PartConfig):
    """Causal self-attention to the last positions, and to compressed entries of earlier ones."""

    module: ClassVar[str] = "arbcli.families.compressed.attention:CompressedAttention"
    code: ClassVar[str] = "arbcli.families.compressed.modeling:CompressedAttention"
    kind: str = field(default="compressed", init=False)
    across: ClassVar[str | None] = "an entry may hold positions of two documents"
    causal: ClassVar[str | None] = "its entries are of positions before the one that reads them"
    drops_attention: ClassVar[bool | None] = False
    heads: int
    kv_heads: int = 1
    """Number of key and value heads, each shared by `heads / kv_heads` query heads."""
    head_width: int | None = None
    """Width of a head; None is the width of the stream divided by `heads`."""
    rotary: int | None = None
    """Width of the rotated part of a head; None is half of it."""
    window: int = 128
    """Number of positions that each position attends to uncompressed, including itself."""
    ratio: Annotated[int, Setting(minimum=2)] = 4
    """Number of positions per entry."""
    pooling: Annotated[str, Setting(choices=POOLINGS)] = "softmax"
    """Pooling of entries."""
    key_gain: bool = False
    """Whether the norm of the keys of positions and entries has learned gains."""
    top_k: int | None = None
    """Number of entries that an indexer selects; None attends to all, without an indexer."""
    index_heads: int = 4
    index_width: int = 32
    """Width of a head of the indexer."""
    sub_norm: bool = True
    """Whether a norm precedes the output projection."""

    def __post_init__(self) -> None:
        """Check types, sizes, and the widths of rotated parts.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        for name in ("head_width", "rotary"):
            check_even_width(name, getattr(self, name))
        check_kv_heads(self.heads, self.kv_heads)
        if self.index_width % 4:
            raise setting_error(
                f"`index_width` is {self.index_width:,}",
                "use a multiple of 4, half of which can be rotated",
            )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of the indexer's loss: arbitrary, as its parameters have no other loss."""
        return {} if self.top_k is None else {"indexer": 1.0}

    def check_at(self, spec: LayerSpec) -> None:
        """Check the width of heads; see `PartConfig.check_at`."""
        if self.head_width is None:
            check_heads(self.heads, spec)
        width, rotated = self.width(spec), self.rotated(spec)
        if width % 2 or rotated > width or width > WIDEST_HEAD:
            raise ArbError(
                f"of {width} numbers of a head, {rotated} cannot be rotated",
                f"use heads of 2 to {WIDEST_HEAD} numbers, of which no more are rotated",
                fields=("head_width", "rotary"),
            )

    def width(self, spec: LayerSpec) -> int:
        """Width of a head."""
        return self.head_width or spec.dim // self.heads

    def rotated(self, spec: LayerSpec) -> int:
        """Width of the rotated part of a head."""
        return self.rotary or self.width(spec) // 4 * 2

    @property
    def vectors(self) -> int:
        """Number of projections per key head: key, value, and gate with softmax pooling."""
        return 3 if self.pooling == "softmax" else 2

    def entries(self, spec: LayerSpec) -> int:
        """Return the maximum number of entries: those of a full window."""
        return max(1, spec.ctx // self.ratio)

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        inner, kv = self.heads * self.width(spec), self.kv_heads * self.width(spec)
        total: float = spec.dim * (2 * inner + self.vectors * kv)
        entries = self.entries(spec)
        if self.top_k is not None:
            width = self.index_heads * self.index_width
            entry_products = spec.dim * (width + self.index_heads) + kv * self.index_width
            total += (entry_products + width * entries) / self.ratio
            entries = min(entries, self.top_k)
        return total + 2 * inner * (min(self.window, positions) + entries)

    def saved_width(self, spec: LayerSpec) -> int:
        """Return the widths of the stream, queries and outputs of heads."""
        return spec.dim + 2 * self.heads * self.width(spec)

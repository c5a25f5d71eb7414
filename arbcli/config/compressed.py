"""What a dense model is made of whose attention is to compressed positions."""

from dataclasses import dataclass
from typing import ClassVar

from arbcli.config.dense import ModelConfig
from arbcli.errors import ArbError

ATTENTIONS = ("dense", "compressed")
"""What the attention of a dense model is to: all positions, or compressed ones and the last."""

MOST_RATIOS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedConfig(ModelConfig):
    """The shape of a `CompressedLM`: a `ByteLM` whose blocks attend to entries of several bytes."""

    kind: ClassVar[str] = "compressed"
    head_width: int | None = None
    """Width of a head; None is `dim` divided by `heads`."""
    kv_heads: int = 1
    """Heads of the keys, each of which serves as many of the queries'."""
    rotary: int | None = None
    """Numbers of a head that are turned by position; None is half of them."""
    window: int = 128
    """Last bytes that a byte attends to as they are, itself one of them."""
    ratios: tuple[int, ...] = (4, 128)
    """Bytes of an entry; blocks take them in turn."""
    indexed_ratio: int = 4
    """Where entries have more bytes, a byte attends to all of them, and no indexer chooses."""
    top_k: int = 128
    """Entries that the indexer chooses."""
    index_heads: int = 4
    index_width: int = 32
    """Width of a head of the indexer."""

    def __post_init__(self) -> None:
        """Refuse what no model can be built from.

        Raises:
            ArbError: a size does not fit.
        """
        if isinstance(self.ratios, list):  # JSON has no tuples
            object.__setattr__(self, "ratios", tuple(self.ratios))
        # a slotted dataclass is a copy of the class that `super()` would mean here
        ModelConfig.__post_init__(self)
        for name in ("head_width", "rotary"):
            value = getattr(self, name)
            if value is not None and (value < 2 or value % 2):
                raise ArbError(
                    f"`{name}` is {value:,}", hint="use an even number above 0", fields=(name,)
                )
        if self.head_dim % 2 or self.turned > self.head_dim or self.head_dim > 512:
            raise ArbError(
                f"heads of {self.head_dim} have no even part of {self.turned} to turn",
                hint="use heads of 2 to 512 numbers, of which no more are turned",
                fields=("head_width", "rotary"),
            )
        if self.heads % self.kv_heads:
            raise ArbError(
                f"{self.kv_heads} heads of keys do not divide {self.heads} heads",
                hint="use a divisor",
                fields=("kv_heads", "heads"),
            )
        if not 1 <= len(self.ratios) <= MOST_RATIOS or min(self.ratios) < 2:
            raise ArbError(
                f"`ratios` has {len(self.ratios)} numbers, of which the least is"
                f" {min(self.ratios, default=0):,}",
                hint=f"use 1 to {MOST_RATIOS} of them, and 2 bytes or more",
                fields=("ratios",),
            )
        if self.index_width % 4:
            raise ArbError(
                f"`index_width` is {self.index_width:,}",
                hint="use a multiple of 4, half of which can be turned",
                fields=("index_width",),
            )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.head_width or self.dim // self.heads

    @property
    def turned(self) -> int:
        """Numbers of a head that are turned by position."""
        return self.rotary or self.head_dim // 4 * 2

    def ratio(self, block: int) -> int:
        """Find how many bytes an entry of a block has."""
        return self.ratios[block % len(self.ratios)]

    def entries(self, ratio: int) -> int:
        """Count the entries that a byte can see at most: those of a whole context."""
        return max(1, self.ctx // ratio)

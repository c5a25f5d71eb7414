"""Self-attention, full or within a sliding window."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.base.errors import ArbError, setting_error
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.config.settings import setting

QUERY_KEY_NORMS = ("unit", "gain", "none")


def check_heads(heads: int, spec: LayerSpec) -> None:
    """Check that the width of the stream is divisible into heads of even width.

    Raises:
        ArbError: it is not.
    """
    if spec.dim % (2 * heads):
        raise setting_error(
            f"{heads} heads do not divide a width of {spec.dim} into even parts",
            f"make `dim` a multiple of {2 * heads}, or choose other `heads`",
        )


def check_kv_heads(heads: int, kv_heads: int) -> None:
    """Check that the number of query heads is a multiple of the number of key heads.

    Raises:
        ArbError: it is not.
    """
    if heads % kv_heads:
        raise ArbError(
            f"{kv_heads} heads of keys do not divide {heads} heads",
            "use a divisor",
            fields=("kv_heads", "heads"),
        )


def check_even_width(name: str, value: int | None) -> None:
    """Check that a width is even and above 0; None is valid.

    Raises:
        ArbError: it is not.
    """
    if value is not None and (value < 2 or value % 2):
        raise setting_error(f"`{name}` is {value:,}", "use an even number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(PartConfig):
    """Self-attention with rotary position embedding."""

    module: ClassVar[str] = "arbcli.model.parts.attention:Attention"
    code: ClassVar[str] = "arbcli.interop.huggingface.modeling_core:Attention"
    kind: str = field(default="attention", init=False)
    across: ClassVar[str | None] = None
    causal: ClassVar[str | None] = None
    drops_attention: ClassVar[bool | None] = True
    heads: int
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key and value heads, each shared by `heads / kv_heads` query heads; None is
    `heads`."""
    head_width: int | None = None
    """Width of a head; None is the width of the stream divided by `heads`."""
    window: int | None = None
    """Number of positions that each position attends to, including itself; None is unlimited. A
    masked model attends to as many positions on the other side."""
    rotary: RotaryConfig = PLAIN
    """Angles of the rotary position embedding."""
    query_key_norm: str = setting("unit", choices=QUERY_KEY_NORMS)
    """Norm of each head of queries and keys before rotation: `unit` is an RMS norm without gains,
    `gain` one with learned gains; `none` omits it."""
    bias: bool = False
    """Whether queries, keys and values have learned biases."""
    output_bias: bool = False
    """Whether the output projection has a learned bias."""
    sink: bool = False
    """Whether each head has an attention sink: a learned logit without a value."""
    sub_norm: bool = True
    """Whether a norm precedes the output projection."""
    bitnet: bool = False
    """Whether the part computes as BitNet b1.58: the trits of a projection have one scale, which no
    step changes, its input is rounded to int8 by row, and the norm before the output has gains."""

    def __post_init__(self) -> None:
        """Check types, sizes and names, and that key heads divide query heads.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        check_even_width("head_width", self.head_width)
        check_kv_heads(self.heads, self.key_heads)

    def check_at(self, spec: LayerSpec) -> None:
        """Check the widths of heads and of their rotated part; see `PartConfig.check_at`."""
        if self.head_width is None:
            check_heads(self.heads, spec)
        if self.rotated(spec) < 2 or self.rotated(spec) % 2:
            raise setting_error(
                f"`share` is {self.rotary.share}, and {self.rotated(spec)} of {self.width(spec)}"
                " numbers of a head would be rotated",
                "choose a share that rotates an even number",
            )

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def width(self, spec: LayerSpec) -> int:
        """Width of a head."""
        return self.head_width or spec.dim // self.heads

    def rotated(self, spec: LayerSpec) -> int:
        """Width of the rotated part of a head."""
        return self.rotary.rotated(self.width(spec))

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        seen = positions if self.window is None else min(self.window, positions)
        inner, kv = self.heads * self.width(spec), self.key_heads * self.width(spec)
        return 2 * spec.dim * (inner + kv) + 2 * inner * seen

    def reach(self, spec: LayerSpec) -> int:
        """Return the window's number of earlier positions."""
        return min(self.window or spec.ctx, spec.ctx) - 1

    def saved_width(self, spec: LayerSpec) -> int:
        """Return the widths of input, queries, keys, values and output."""
        return spec.dim + 2 * (self.heads + self.key_heads) * self.width(spec)

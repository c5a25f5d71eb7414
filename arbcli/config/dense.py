"""What a model of dense blocks is made of, and how its weights are stored."""

from dataclasses import dataclass
from typing import ClassVar

from arbcli.config.checks import check_choice, check_fields, check_sizes
from arbcli.directions import DIRECTIONS
from arbcli.errors import ArbError
from arbcli.rules import DIGITS, FADED, FADING, RULES, WITH_DIGITS

VOCABULARY = 256
"""Every byte is a symbol."""

SCALE_TYPES = {f"T{size}": size for size in (4, 6, 8, 16, 32, 64, 96, 128)}
"""Scale type to group size: how many weights of a row share one scale."""

WEIGHTS = ("ternary", "float", "ste")
STREAMS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a `ByteLM`, and how its weights are stored."""

    kind: ClassVar[str] = "dense"
    """The architecture; a name of `KINDS`."""
    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Attention heads of a block; they divide `dim` into even widths."""
    ffn: int
    """Width of the gated MLP."""
    ctx: int
    """Context in bytes that the model is trained on."""
    scale_type: str = "T32"
    """How many weights share a scale."""
    rule: str = "moment"
    """The update rule, which decides what is stored beside the trits."""
    digits: str = "trit"
    """What a weight is: the `trit`, or `all` digits that the rule stores, or `fade`: first all and
    at the end the trit. A checkpoint in the middle has one of `FADED`."""
    direction: str | None = "orthogonal"
    """The direction of a step; `factored` stores statistics of rows and columns."""
    weights: str = "ternary"
    """`ternary`, or a twin to compare with: `float`, or `ste` (float latents, ternary forward)."""
    sub_norms: bool = True
    """Whether a norm precedes the output projections too."""
    streams: int = 1
    """Residual streams; one of `STREAMS`. Several are mixed by hyper-connections."""

    def __post_init__(self) -> None:
        """Refuse what no model can be built from.

        Raises:
            ArbError: a value is of another type, a size is out of range, or a name is unknown.
        """
        check_fields(self)
        check_sizes(self)
        if self.dim % (2 * self.heads):
            raise ArbError(
                f"{self.heads} heads do not divide a width of {self.dim} into even parts",
                hint=f"make `dim` a multiple of {2 * self.heads}, or choose other `heads`",
                fields=("dim", "heads"),
            )
        check_choice("scale_type", self.scale_type, SCALE_TYPES)
        check_choice("rule", self.rule, RULES)
        if self.digits not in FADED:
            check_choice("digits", self.digits, DIGITS)
        able = WITH_DIGITS if self.digits in ("all", "trit") else FADING
        stores = self.rule in WITH_DIGITS and self.weights == "ternary"
        if self.digits != "trit" and not (stores and self.rule in able):
            what = f"the rule `{self.rule}`" if self.weights == "ternary" else "a float twin"
            does = "does not fade to" if stores else "stores no digits below"
            raise ArbError(
                f"{what} {does} the trit",
                hint=f"leave `digits={self.digits}` out, or use one of: {', '.join(able)}",
                fields=("digits",),
            )
        check_choice("direction", self.direction or DIRECTIONS[0], DIRECTIONS)
        check_choice("weights", self.weights, WEIGHTS)
        if self.streams not in STREAMS or (self.streams > 1 and self.kind != "dense"):
            known = ", ".join(map(str, STREAMS)) if self.kind == "dense" else "1 with this preset"
            raise ArbError(
                f"`streams` is {self.streams}", hint=f"use one of: {known}", fields=("streams",)
            )

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return SCALE_TYPES[self.scale_type]

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.dim // self.heads

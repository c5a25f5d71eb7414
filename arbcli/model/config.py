"""What a model is made of: presets, update rules and scale types, as plain frozen values."""

import dataclasses
from dataclasses import dataclass

from arbcli.errors import ArbError

VOCABULARY = 256
"""Every byte is a symbol."""

SCALE_TYPES = {f"T{size}": size for size in (4, 6, 8, 16, 32, 64, 96, 128)}
"""Scale type to group size: how many weights of a row share one scale."""

WEIGHTS = ("ternary", "float", "ste")
DIRECTIONS = ("orthogonal", "factored", "sign")


@dataclass(frozen=True, slots=True)
class Rule:
    """How a step changes packed weights, and so what must be stored for each of them."""

    radix: int
    """P: what a trit is worth in units of the remainder."""
    remainder_max: int
    """Largest magnitude of the remainder above a trit; z is clipped to +-(P + this)."""
    moment_range: float = 0.0
    """The largest moment, in root-mean-squares of the direction; 0 where there is no moment."""
    direction: str | None = "orthogonal"
    """Default direction; None where the rule takes no direction."""
    lr: float = 1.0
    """Default `--lr`."""
    nibble: bool = False
    """Whether remainder and moment share a byte, four bits each."""

    @property
    def bytes_per_weight(self) -> int:
        """Whole bytes stored for each weight beside its packed trit."""
        return 2 if self.moment_range and not self.nibble else 1


RULES = {
    "moment": Rule(radix=32, remainder_max=127, moment_range=2.0),
    "nibble": Rule(
        radix=8, remainder_max=7, moment_range=0.6, direction="factored", lr=0.6, nibble=True
    ),
    "carry": Rule(radix=32, remainder_max=127, direction="factored"),
    "votes": Rule(radix=32, remainder_max=127, direction=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a `ByteLM`, and how its weights are stored."""

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
    direction: str | None = "orthogonal"
    """The direction of a step; `factored` stores statistics of rows and columns."""
    weights: str = "ternary"
    """`ternary`, or a twin to compare with: `float`, or `ste` (float latents, ternary forward)."""
    sub_norms: bool = True
    """Whether a norm precedes the output projections too."""

    def __post_init__(self) -> None:
        """Refuse what no model can be built from.

        Raises:
            ArbError: a size is not positive, or a name is unknown.
        """
        for name in ("dim", "layers", "heads", "ffn", "ctx"):
            if getattr(self, name) < 1:
                raise ArbError(f"`{name}` is {getattr(self, name)}", hint="use 1 or more")
        if self.dim % (2 * self.heads):
            raise ArbError(
                f"{self.heads} heads do not divide a width of {self.dim} into even parts",
                hint=f"make `--dim` a multiple of {2 * self.heads}, or choose other `--heads`",
            )
        for option, value, known in (
            ("--tscale-type", self.scale_type, SCALE_TYPES),
            ("--rule", self.rule, RULES),
            ("--direction", self.direction or DIRECTIONS[0], DIRECTIONS),
            ("--weights", self.weights, WEIGHTS),
        ):
            if value not in known:
                names = ", ".join(f"`{name}`" for name in known)
                raise ArbError(f"`{option}` is `{value}`", hint=f"choose one of: {names}")

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return SCALE_TYPES[self.scale_type]

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.dim // self.heads


def preset(name: str, **overrides: object) -> ModelConfig:
    """Build the configuration called `name`, with the overrides that are not None.

    A rule brings its own direction, unless one is given.

    Raises:
        ArbError: no preset has that name, or a value does not fit.
    """
    if name not in PRESETS:
        names = ", ".join(f"`{known}`" for known in PRESETS)
        raise ArbError(f"no preset is named `{name}`", hint=f"choose one of: {names}")
    given = {key: value for key, value in overrides.items() if value is not None}
    rule = RULES.get(str(given.get("rule", "moment")))
    if rule is not None:
        if rule.direction is None and "direction" in given:
            raise ArbError(
                f"the rule `{given['rule']}` takes no direction", hint="leave `--direction` out"
            )
        given.setdefault("direction", rule.direction)
    return dataclasses.replace(PRESETS[name], **given)


PRESETS = {
    "tiny": ModelConfig(dim=256, layers=4, heads=4, ffn=704, ctx=64),
    "small": ModelConfig(dim=384, layers=6, heads=6, ffn=1024, ctx=256),
    "base": ModelConfig(dim=768, layers=12, heads=12, ffn=2048, ctx=1024),
    "1b": ModelConfig(dim=2048, layers=24, heads=16, ffn=5632, ctx=2048),
}

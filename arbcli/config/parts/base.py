"""Base class of the configurations of parts."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from arbcli.base.errors import ArbError
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.settings import Setting, check_fields
from arbcli.model.rules import RULES

if TYPE_CHECKING:
    from arbcli.config.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PartConfig:
    """Configuration of a part, which validates itself."""

    kind: str = field(init=False)
    """Name of the kind in files."""
    rule: Annotated[str | None, Setting(choices=RULES)] = None
    """Update rule of the part's weights; None is that of the model, or of a part around it."""
    module: ClassVar[str] = ""
    """Class of the part, a `torch.nn.Module`, as `module:class`: see `arbcli.base.lazy`."""
    code: ClassVar[str] = ""
    """Class of the part in plain PyTorch, for exports to Transformers and as the reference, as
    `module:class`; such modules only import torch and one another."""
    across: ClassVar[str | None] = "it would pass something from one document to the next"
    """Reason why the part cannot process packed documents independently; None if it can."""
    causal: ClassVar[str | None] = "it reads what is before a position"
    """Reason why the part cannot be bidirectional; None if it can."""

    drops_attention: ClassVar[bool | None] = None
    """Whether attention weights can be dropped in training; None if the part has none."""

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the part's auxiliary losses in the training loss, by name."""
        return {}

    @property
    def reads_text(self) -> bool:
        """Whether the part also reads the bytes of the text."""
        return False

    def __post_init__(self) -> None:
        """Check types, sizes and the rule.

        Raises:
            ArbError: a value has the wrong type, a size is out of bounds, or no rule has the name.
        """
        check_fields(self)

    def part_spec(self, spec: LayerSpec) -> LayerSpec:
        """Return the spec of the part's own weights, from the spec of the part."""
        spec = spec if self.rule is None else spec.replace_rule(self.rule)
        return replace(spec, digits="trit", bitnet=True) if self.is_bitnet else spec

    @property
    def is_bitnet(self) -> bool:
        """Whether the part has a field `bitnet`, and computes as BitNet b1.58 does."""
        return getattr(self, "bitnet", False)

    def check_at(self, spec: LayerSpec) -> None:
        """Check that the part is valid for a spec.

        Raises:
            ArbError: it is not.
        """

    def check_model(self, config: "ModelConfig") -> None:
        """Check that the part can be combined with the rest of the model.

        Raises:
            ArbError: it cannot.
        """
        plain = config.weights == "ternary" and config.digits in ("all", "trit")
        sub_norm = getattr(self, "sub_norm", False)
        if self.is_bitnet and not (plain and config.norm_gain and sub_norm):
            raise ArbError(
                "`bitnet` has norms with gains before each product, and trits from the first step",
                "use `norm_gain` and `sub_norm`, and neither a baseline nor weights that fade",
                fields=("digits", "weights"),
            )

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications in matrix products per position.

        Args:
            spec: spec of the part.
            positions: length of a window; attention is counted as if every position saw all of it.
        """
        raise NotImplementedError

    def reach(self, spec: LayerSpec) -> int | None:
        """Return the number of earlier positions that an output depends on; None: unlimited."""
        return None

    def saved_width(self, spec: LayerSpec) -> int:
        """Return a lower bound of the activations per position that a training step stores."""
        return spec.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig(PartConfig):
    """Configuration of a part that splits an outer stage into chunks, positions of the next one."""

    @property
    def boundaries(self) -> str:
        """Kind of boundaries: how the starts of chunks are found."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Average number of positions per chunk."""
        raise NotImplementedError

    def slots(self, positions: int) -> int:
        """Return the maximum number of chunks in a window."""
        raise NotImplementedError

    def products_with(self, spec: LayerSpec, inner: int, positions: float) -> float:
        """Return the multiplications per window.

        Args:
            spec: spec of the outer stage.
            inner: width of the next stage.
            positions: number of positions in a window of the outer stage.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenConfig(PartConfig):
    """Configuration of a part between two blocks of the innermost stage."""

    place: Annotated[int, Setting(minimum=0)] = 0
    """Number of the stage's blocks before the part."""

    @property
    def outputs(self) -> int:
        """Number of outputs that the stage's router mixes."""
        return 0


def every_part(config: Any) -> Iterator[PartConfig]:
    """Yield all parts in a configuration, also those within parts."""
    if isinstance(config, tuple):
        for entry in config:
            yield from every_part(entry)
    elif is_dataclass(config):
        if isinstance(config, PartConfig):
            yield config
        for field in fields(config):
            yield from every_part(getattr(config, field.name))


def remove_rules(config: Any) -> Any:
    """Return a configuration whose parts have no rules of their own."""
    if isinstance(config, tuple):
        return tuple(map(remove_rules, config))
    if not is_dataclass(config) or isinstance(config, type):
        return config
    changed = {field.name: remove_rules(getattr(config, field.name)) for field in fields(config)}
    changed = {name: value for name, value in changed.items() if value != getattr(config, name)}
    changed |= {"rule": None} if isinstance(config, PartConfig) and config.rule else {}
    return replace(config, **changed) if changed else config

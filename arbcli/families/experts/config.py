"""Mixture of experts with top-k routing."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from arbcli.base.errors import setting_error
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.base import PartConfig
from arbcli.config.settings import Setting

GATES = ("softmax", "softplus", "hash")
"""Kinds of routing; see `arbcli.families.experts.mixture`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(PartConfig):
    """Gated MLPs, of which each position uses `top_k`."""

    module: ClassVar[str] = "arbcli.families.experts.mixture:Experts"
    code: ClassVar[str] = "arbcli.families.experts.modeling:Experts"
    kind: str = field(default="experts", init=False)
    across: ClassVar[str | None] = None
    causal: ClassVar[str | None] = None
    experts: int
    top_k: int = 2
    """Number of experts per position; the weight of a single one is 1, which trains no gate."""
    width: int
    """Hidden width of an expert."""
    gate: Annotated[str, Setting(choices=GATES)] = "softmax"
    """Kind of routing."""
    shared: bool = False
    """Whether there is a shared expert, which every position uses."""
    clamp: bool = False
    """Whether the inputs of the experts' gates are clamped."""

    def __post_init__(self) -> None:
        """Check types, sizes and the gate.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        if self.top_k > self.experts:
            raise setting_error(
                f"`top_k` is {self.top_k} of {self.experts} experts", f"use 1 to {self.experts}"
            )

    @property
    def reads_text(self) -> bool:
        """Whether experts are selected by a hash of the text's bytes."""
        return self.gate == "hash"

    def products_of(self, dim: int, query: int) -> int:
        """Return the number of multiplications per position.

        Args:
            dim: width of the experts' inputs and outputs.
            query: width of the vector that the gate reads.
        """
        return query * self.experts + (self.top_k + self.shared) * 3 * dim * self.width

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return self.products_of(spec.dim, spec.dim)

    def saved_width(self, spec: LayerSpec) -> int:
        """Return the widths of the input, and of the gates and products of the experts."""
        return spec.dim + 2 * self.top_k * self.width

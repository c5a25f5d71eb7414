"""Head for multi-byte prediction, which predicts bytes after the next one."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from arbcli.base.errors import setting_error
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.base import PartConfig
from arbcli.config.settings import Setting

BYTES = 256
"""Number of symbols that the head predicts."""
MAX_AHEAD = 8
"""Maximum number of bytes that are predicted, attended or checked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadConfig(PartConfig):
    """A recurrence over the bytes after a position, which predicts each from the previous ones."""

    module: ClassVar[str] = "arbcli.families.ahead.head:Ahead"
    kind: str = field(default="ahead", init=False)
    positions: Annotated[int, Setting(minimum=2, maximum=MAX_AHEAD)]
    """Number of bytes predicted at a position, including the byte of the model's main head."""
    width: int
    """Width of the MLP's hidden layer."""
    weight: float = 0.1
    """Weight of the sum of the head's losses in the training loss, in (0, 1]."""

    def __post_init__(self) -> None:
        """Check types and bounds.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        if not 0 < self.weight <= 1:
            raise setting_error(f"`weight` is {self.weight}", "use a number above 0 and at most 1")

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the head's losses, beginning with the second next byte."""
        return tuple(f"next_{number}" for number in range(2, self.positions + 1))

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the losses by their names."""
        return dict.fromkeys(self.losses, self.weight / len(self.losses))

    def check_at(self, spec: LayerSpec) -> None:
        """Check that a window is longer than the prediction.

        Raises:
            ArbError: it is not.
        """
        if self.positions >= spec.ctx:
            raise setting_error(
                f"`positions` is {self.positions} in a context of {spec.ctx}",
                "use fewer, or a longer context",
            )

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        products_of_position = spec.dim * (spec.dim + BYTES) + 3 * spec.dim * self.width
        return (self.positions - 1) * products_of_position

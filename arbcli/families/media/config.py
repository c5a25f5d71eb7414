"""Composite head for several kinds of bytes: text, sound and pictures."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from arbcli.base.errors import ArbError
from arbcli.config.layer_spec import VOCABULARY, LayerSpec
from arbcli.config.parts.base import PartConfig
from arbcli.config.settings import Setting

if TYPE_CHECKING:
    from arbcli.config.model import ModelConfig

KINDS = ("text", "sound", "picture")
"""Kinds of bytes; each has a head."""
BYTES = 256
"""Number of symbols that a head predicts."""
Weight = Annotated[float, Setting(minimum=0, maximum=10)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositeConfig(PartConfig):
    """Weights of the losses of a head for each kind of bytes; their mixture predicts the next byte.

    The loss of the mixture has weight 1.
    """

    module: ClassVar[str] = "arbcli.families.media.head:CompositeHead"
    code: ClassVar[str] = "arbcli.families.media.modeling:CompositeHead"
    kind: str = field(default="composite", init=False)
    text: Weight = 0.1
    """Weight of the loss of the head for text, 0 to 10."""
    sound: Weight = 0.1
    """Weight of the loss of the head for sounds, 0 to 10."""
    picture: Weight = 0.1
    """Weight of the loss of the head for pictures, 0 to 10."""

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the losses by their names."""
        return {f"of_{name}": getattr(self, name) for name in KINDS}

    def check_model(self, config: "ModelConfig") -> None:
        """Check that there is no other head, and that the model predicts next bytes.

        Raises:
            ArbError: a setting cannot be combined with a composite head.
        """
        for name, is_set in (
            ("ahead", config.ahead is not None),
            ("tied", config.tied),
            ("vocabulary", config.vocabulary != VOCABULARY),
            ("objective", config.fills),
        ):
            if is_set:
                raise ArbError(
                    f"a composite head does not combine with `{name}`",
                    f"leave `{name}` or `composite` out",
                    fields=(name,),
                )

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return spec.dim * len(KINDS) * (BYTES + 1)

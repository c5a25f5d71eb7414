"""Multi-head latent attention."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.base.errors import setting_error
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.attention import check_heads
from arbcli.config.parts.base import PartConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig(PartConfig):
    """Self-attention whose keys and values are projections of a latent vector."""

    module: ClassVar[str] = "arbcli.families.latent.attention:LatentAttention"
    code: ClassVar[str] = "arbcli.families.latent.modeling:LatentAttention"
    kind: str = field(default="latent", init=False)
    across: ClassVar[str | None] = "its attention has no mask of documents"
    causal: ClassVar[str | None] = None
    drops_attention: ClassVar[bool | None] = True
    heads: int
    latent: int
    """Width of the latent vector of keys and values."""
    rotary: int
    """Width of the rotated part of a head."""
    sub_norm: bool = True
    """Whether a norm precedes the output projection."""

    def check_at(self, spec: LayerSpec) -> None:
        """Check that the rotated part fits a head; see `PartConfig.check_at`."""
        check_heads(self.heads, spec)
        width = self.head_width(spec)
        if self.rotary % 2 or self.rotary > width:
            raise setting_error(
                f"of {width} numbers of a head, {self.rotary} cannot be rotated",
                "use a larger `dim`, or fewer `heads`",
            )

    def head_width(self, spec: LayerSpec) -> int:
        """Width of a head."""
        return spec.dim // self.heads

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        down = spec.dim * (spec.dim + self.latent + self.rotary)
        up = self.latent * (2 * spec.dim - self.heads * self.rotary)
        return down + up + spec.dim**2 + 2 * spec.dim * positions

    def saved_width(self, spec: LayerSpec) -> int:
        """Return the widths of input, queries, keys, values and output."""
        return 5 * spec.dim

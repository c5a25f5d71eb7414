"""Chunking: boundaries and maximum number of chunks."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from arbcli.base.errors import ArbError, setting_error
from arbcli.config.layer_spec import VOCABULARY, LayerSpec
from arbcli.config.parts.base import PartConfig, SplitConfig
from arbcli.config.settings import Setting

if TYPE_CHECKING:
    from arbcli.config.model import ModelConfig

BOUNDARIES = ("learned", "every", "space")
"""Starts of chunks: learned by a router, every `length` positions, or after a space."""
SPARE_SLOTS = 1.5
"""Factor of the number of slots over the number of chunks of average length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingConfig(SplitConfig):
    """Split of an outer stage's positions into chunks, the positions of the next stage."""

    module: ClassVar[str] = "arbcli.families.hnet.stage:Stage"
    code: ClassVar[str] = "arbcli.families.hnet.modeling:Stage"
    kind: str = field(default="chunking", init=False)
    boundaries: Annotated[str, Setting(choices=BOUNDARIES)] = "learned"
    """Kind of boundaries."""
    length: int = 4
    """Average number of positions per chunk, which is the target of a router."""

    def __post_init__(self) -> None:
        """Check types, sizes and names.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        if self.length < 2:
            raise setting_error(f"`chunk_length` is {self.length}", "use 2 or more")

    def check_model(self, config: "ModelConfig") -> None:
        """Check that chunks that begin after spaces are chunks of bytes.

        Raises:
            ArbError: they are chunks of chunks or of tokens.
        """
        if self.boundaries != "space":
            return
        if any(chunking is self for chunking in config.chunkings[1:]):
            raise ArbError(
                "`boundaries` is `space`, and chunks of chunks have no spaces",
                "use one stage, or `learned` or `every`",
                fields=("boundaries",),
            )
        if config.vocabulary != VOCABULARY:
            raise ArbError(
                f"`boundaries=space` reads bytes, and the model has {config.vocabulary:,} symbols",
                f"leave it out, or the tokenizer: bytes are {VOCABULARY} symbols",
                fields=("vocabulary", "boundaries"),
            )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of the ratio loss.

        H-Net uses 0.03; with ten times that, chunks keep their target length.
        """
        return {"ratio": 0.3}

    def slots(self, positions: int) -> int:
        """Return the maximum number of chunks in a window."""
        # `length` does not affect boundaries at spaces, so these need spare slots, too
        share = 1 if self.boundaries == "every" else SPARE_SLOTS
        return math.ceil(positions * share / self.length)

    def products_with(self, spec: LayerSpec, inner: int, positions: float) -> float:
        """Return the multiplications per window: router, residual, and projections in and out.

        Args:
            spec: spec of the outer stage.
            inner: width of the next stage.
            positions: number of positions in a window of the outer stage.
        """
        position_products = spec.dim**2 * (3 if self.boundaries == "learned" else 1)
        return positions * position_products + positions / self.length * 2 * spec.dim * inner

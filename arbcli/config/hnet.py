"""What a model that finds its own chunks is made of."""

import math
from dataclasses import dataclass
from typing import ClassVar

from arbcli.config.checks import check_choice
from arbcli.config.dense import ModelConfig
from arbcli.errors import ArbError

BOUNDARIES = ("learned", "every", "space")
"""Who says where chunks begin: a router that learns it, every so many bytes, or after a space."""
OUTER_BLOCKS = ("attention", "mamba")
"""What encoders and decoders are made of: windowed attention and MLP, or Mamba-2."""
OF_STAGES = ("outer_dim", "outer_layers", "outer_heads", "outer_ffn", "chunk_length")
"""Fields with a number for each stage, the outermost first."""
MOST_STAGES = 8
SPARE_SLOTS = 1.5
"""Slots for chunks, over those that a text of chunks of `chunk_length` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HNetConfig(ModelConfig):
    """The shape of an `HNet`: stages of outer blocks around a main network on chunks.

    `dim`, `layers`, `heads` and `ffn` are those of the main network, whose blocks are dense ones.
    """

    kind: ClassVar[str] = "hnet"
    outer_dim: tuple[int, ...]
    """Widths of the stages' streams."""
    outer_layers: tuple[int, ...]
    """Blocks of a stage's encoder, and as many of its decoder."""
    outer_heads: tuple[int, ...]
    outer_ffn: tuple[int, ...]
    chunk_length: tuple[int, ...]
    """Positions of a chunk that the router of a stage is held to, on average."""
    window: int
    """Positions that an outer block of attention attends to."""
    outer_blocks: str = "attention"
    """One of `OUTER_BLOCKS`."""
    states: int = 64
    """Numbers of the state of a Mamba-2 block, for each number of a head."""
    boundaries: str = "learned"
    """One of `BOUNDARIES`."""

    def __post_init__(self) -> None:
        """Refuse what no model can be built from.

        Raises:
            ArbError: a size does not fit.
        """
        stages = len(self.outer_dim) if isinstance(self.outer_dim, tuple | list) else 1
        for name in OF_STAGES:
            value = getattr(self, name)  # JSON has lists, and one number is for every stage
            if type(value) is int:
                object.__setattr__(self, name, (value,) * stages)
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        # a slotted dataclass is a copy of the class that `super()` would mean here
        ModelConfig.__post_init__(self)
        for name in OF_STAGES:
            value = getattr(self, name)
            if len(value) != stages or not 1 <= stages <= MOST_STAGES:
                raise ArbError(
                    f"`{name}` is of {len(value)} stages, and `outer_dim` of {stages}",
                    hint=f"give a number for each stage, of which there are 1 to {MOST_STAGES}",
                    fields=(name, "outer_dim"),
                )
        check_choice("boundaries", self.boundaries, BOUNDARIES)
        check_choice("outer_blocks", self.outer_blocks, OUTER_BLOCKS)
        if min(self.chunk_length) < 2:
            raise ArbError(
                f"`chunk_length` is {min(self.chunk_length)}",
                hint="use 2 or more: chunks of one position are no chunks",
                fields=("chunk_length",),
            )
        if self.boundaries == "space" and stages > 1:
            raise ArbError(
                "`boundaries` is `space`, and chunks of chunks have no spaces",
                hint="use one stage, or `learned` or `every`",
                fields=("boundaries",),
            )
        for stage in range(stages):
            self.outer(stage)

    @property
    def stages(self) -> int:
        """Number of stages around the main network."""
        return len(self.outer_dim)

    @property
    def slots(self) -> tuple[int, ...]:
        """Positions at each stage of a window of `ctx` bytes, those of the main network last."""
        found = [self.ctx]
        for length in self.chunk_length:
            # words are as long as they are, whatever `chunk_length` says
            share = 1 if self.boundaries == "every" else SPARE_SLOTS
            found.append(math.ceil(found[-1] * share / length))
        return tuple(found)

    def capacity(self, stage: int, length: int) -> int:
        """Find how many chunks of a stage a window may have that is `length` positions long."""
        return min(length, self.slots[stage + 1])

    def outer(self, stage: int) -> ModelConfig:
        """Describe the blocks around a stage as those of a dense model; `ctx` is what they see.

        Raises:
            ArbError: a size does not fit.
        """
        return self._dense(
            dim=self.outer_dim[stage],
            layers=self.outer_layers[stage],
            heads=self.outer_heads[stage],
            ffn=self.outer_ffn[stage],
            ctx=self.slots[stage],
        )

    def main(self) -> ModelConfig:
        """Describe the blocks of the main network as those of a dense model."""
        shape = {name: getattr(self, name) for name in ("dim", "layers", "heads", "ffn")}
        return self._dense(**shape, ctx=self.slots[-1])

    def _dense(self, **shape: int) -> ModelConfig:
        stored = ("scale_type", "rule", "direction", "digits", "weights", "sub_norms")
        return ModelConfig(**shape, **{name: getattr(self, name) for name in stored})

"""The interface of the parts of a block: mixers of positions, and channel mixers."""

from typing import Any, ClassVar

from torch import Tensor, nn

from arbcli.kernels.attention.eight_bits import KeptIn
from arbcli.model.flow import Flow, Reading
from arbcli.model.state import Clock, State


class Part(nn.Module):
    """A mixer or a channel mixer; its first arguments are its configuration and its `Site`."""

    name: ClassVar[str]
    """Of its tensors within a block."""
    norm_name: ClassVar[str | None] = None
    """Of the norm before it; None is `name` with `_norm`."""
    steps_fused = False
    """Whether `step` has kernels for one position of a text, where shapes and storage allow."""
    steps_texts = False
    """Whether there is `step_texts`."""
    steps_ahead = False
    """Whether `step` takes several positions of a text that may be taken back; each has the bits
    that it has by itself. Of these a state keeps nothing until it is told how many stay."""
    steps_along = False
    """Whether these kernels take several positions of a text, where they are loops on a CPU."""

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        reading: Reading | None = None,
        state: Any = None,
    ) -> Flow:
        """Compute what to add to the stream.

        Args:
            x: the stream, (B, T, D).
            norm: before the part.
            added: what is still to be added to x.
            reading: what is read besides; None where no part reads any.
            state: of the text before these positions, which are then added to it; B is 1. None is
                whole windows.

        Returns:
            x with what was to be added, and what is to be added next.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: Any, *, add_residual: bool = True) -> Tensor:
        """Add to one position, (1, 1, D), or of several texts (B, 1, D): see `steps_fused`.

        A part that `steps_along` takes several of a text, (1, T, D), too.

        Args:
            x: the stream.
            state: of the text before, or of several.
            add_residual: whether to return x plus the output, or only the output.
        """
        raise NotImplementedError

    def step_texts(self, x: Tensor, norm: nn.Module, reading: Reading) -> Tensor:
        """Compute what to add to a position of each of several texts, (B, 1, D), without a state.

        What a text gives has bits that depend on no other, nor on their number.
        """
        raise NotImplementedError

    def new_state(self, clock: Clock) -> State | None:
        """Make the state of a text; None where nothing is kept."""
        return None

    def linears(self) -> tuple[nn.Module, ...]:
        """List the linear layers in the order of a forward, if they are decoded with others'."""
        return ()


class CachedAttention(Part):
    """Attention whose keys and values a state keeps."""

    kept = KeptIn()
    """Format that a forward without a state rounds them to, as a state in eight bits does."""
    rounds_queries = False
    """Whether queries may be in eight bits too."""

"""Interface of the parts of a block: mixers and channel mixers."""

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from arbcli.base.lazy import imported
from arbcli.config.parts.base import PartConfig
from arbcli.config.site import LayerSpec
from arbcli.model.flow import BlockInputs, BlockOutput

if TYPE_CHECKING:
    from arbcli.model.state import PositionCounter, State


def build_part(config: PartConfig, site: LayerSpec, *arguments: Any) -> Any:
    """Build a part with uninitialised weights; the class is imported on first use.

    Args:
        config: configuration of the part, whose class names that of the module.
        site: site of the part; a rule of the configuration replaces that of the site.
        arguments: further arguments of the module's class.
    """
    return imported(config.module)(config, config.own_site(site), *arguments)


class Part(nn.Module):
    """A mixer or a channel mixer, constructed from its configuration and its `LayerSpec`."""

    name: ClassVar[str]
    """Name of the part in its block, and prefix of its tensors."""
    norm_name: ClassVar[str | None] = None
    """Name of the norm before it; None is `name` with `_norm`."""
    steps_fused = False
    """Whether `step` uses fused kernels for one position, if shapes and storage allow."""
    steps_texts = False
    """Whether `step_texts` is implemented."""
    steps_ahead = False
    """Whether `step` supports speculative positions, with the same bits as one by one. The state
    only stores them once they are accepted."""
    steps_along = False
    """Whether `step` takes several positions of a text on a CPU, whose kernels loop over them."""

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Names of tensors that a window as long as the context does not use."""
        return ()

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        reading: BlockInputs | None = None,
        state: Any = None,
    ) -> BlockOutput:
        """Compute the part's contribution to the residual stream.

        Args:
            x: the stream, (B, T, D).
            norm: norm before the part.
            added: pending addition to x.
            reading: additional inputs; None if no part reads any.
            state: decoding state, to which the positions are added; B is 1. None for complete
                windows.

        Returns:
            x + added, with the part's output as the new pending addition.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: Any, residual: Tensor | None) -> Tensor:
        """Run the part for one position of a text, (1, 1, D), or of a batch of texts, (B, 1, D).

        With `steps_along` it also takes several positions of a text, (1, T, D).

        Args:
            x: the stream.
            state: decoding state of the text or of the batch.
            residual: tensor like x to add the output to; None returns the output alone.
        """
        raise NotImplementedError

    def step_texts(self, x: Tensor, norm: nn.Module, reading: BlockInputs) -> Tensor:
        """Compute the contribution to one position of each text, (B, 1, D), without a state.

        The bits of a text's result depend neither on the other texts nor on their number.
        """
        raise NotImplementedError

    def new_state(self, clock: "PositionCounter") -> "State | None":
        """Create the decoding state of a text; None for a part without state."""
        return None

    def linears(self) -> tuple[nn.Module, ...]:
        """Return the linear layers in order of use, if they can be decoded in groups."""
        return ()

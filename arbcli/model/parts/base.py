"""Interface of the parts of a block, mixers and channel mixers, and the values passed between them.

These are the residual stream, losses and other inputs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from arbcli.base.lazy import imported
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.base import PartConfig

if TYPE_CHECKING:
    from arbcli.model.layers.dropout import Dropout
    from arbcli.model.state import PositionCounter, State


def split_texts(x: Tensor) -> list[Tensor]:
    """Copy (B, ...) to B tensors (1, ...); alignment of views could change the sums of a kernel."""
    return [row.clone() for row in x.split(1)]


def map_texts(run: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """Apply a function of tensors to each text of a batch separately, (B, 1, ...) each.

    The bits of each result do not depend on the other texts, whatever kernels the function uses.
    """
    if len(parts[0]) == 1:
        return run(*parts)
    return torch.cat([run(*rows) for rows in zip(*map(split_texts, parts), strict=True)])


Losses = dict[str, list[Tensor]]
"""Float32 scalars that are summed to a loss, by the name of the loss."""


def merge_losses(*losses: Losses) -> Losses:
    """Concatenate the lists of each loss, in order."""
    merged: Losses = {}
    for part_losses in losses:
        for name, parts in part_losses.items():
            merged.setdefault(name, []).extend(parts)
    return merged


class BlockOutput(NamedTuple):
    """The residual stream after a part."""

    x: Tensor
    """(B, T, D), or (B, T, n, D) with n residual streams."""
    added: Tensor | None = None
    """A pending addition to x, which the next norm's kernel fuses."""
    losses: Losses = {}  # noqa: RUF012  # never modified

    def total(self) -> Tensor:
        """Return x with the pending addition."""
        return self.x if self.added is None else self.x + self.added


class Documents(NamedTuple):
    """The attention mask of windows in which several documents are packed."""

    mask: Tensor
    """(B, 1, T, T) bool: causal, and only within a document."""

    @classmethod
    def from_numbers(cls, numbers: Tensor) -> "Documents":
        """Build the mask from the number of each position's document, (B, T) integers."""
        length = numbers.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=numbers.device).tril()
        return cls(((numbers[:, :, None] == numbers[:, None]) & causal)[:, None])

    def limit(self, window: int | None) -> Tensor:
        """Return the mask, (B, 1, T, T) bool, restricted to a window of `window` positions."""
        if window is None or window >= self.mask.shape[-1]:
            return self.mask
        return self.mask.triu(1 - window)


class BlockInputs(NamedTuple):
    """Additional inputs of parts, indexed by the positions of the current stage."""

    position_ids: Tensor | None = None
    """(B, T) int64, index of the byte at which each position begins, -1 for an empty slot; None in
    the outermost stage, whose positions are bytes."""
    grams: Tensor | None = None
    """(B, T) int64, keys of the n-grams that end at each position; None if no part reads them."""
    documents: Documents | None = None
    """Attention mask of packed documents; None if a window is one text."""
    dropout: "Dropout | None" = None
    """Dropout of the model, of a block, or of a branch; None outside of training."""

    @property
    def valid(self) -> Tensor | None:
        """Mask of the slots that hold a position, (B, T) bool; None if all do."""
        return None if self.position_ids is None else self.position_ids >= 0

    def select_text(self, text: int) -> "BlockInputs":
        """Select one text of a batch."""
        position_ids, grams = (
            None if part is None else part[text : text + 1]
            for part in (self.position_ids, self.grams)
        )
        return BlockInputs(position_ids, grams)

    def select_positions(self, first: Tensor) -> "BlockInputs":
        """Select the positions at which chunks begin, (B, C) int64, -1 for an empty slot."""
        index = first.clamp(min=0)
        grams = None if self.grams is None else self.grams.gather(1, index)
        position_ids = index if self.position_ids is None else self.position_ids.gather(1, index)
        return BlockInputs(position_ids.masked_fill(first < 0, -1), grams, dropout=self.dropout)


def fits_vectors(*widths: int) -> bool:
    """Return whether decoding kernels support rows of these widths: multiples of eight elements."""
    return all(width % 8 == 0 for width in widths)


def project(
    layer: nn.Module, x: Tensor, norm: nn.Module | None, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply a linear layer to the normalised stream, (B, T, D), with its pending addition.

    Returns:
        The product, (B, T, N), and the sum x + added, (B, T, D).
    """
    return (layer(x, norm), x) if added is None else layer(x, norm, added)


def build_part(config: PartConfig, spec: LayerSpec, *arguments: Any) -> Any:
    """Build a part with uninitialised weights; the class is imported on first use.

    Args:
        config: configuration of the part, whose class names the module's class.
        spec: storage settings and width; a rule of the configuration overrides that of the spec.
        arguments: further arguments of the module's class.
    """
    return imported(config.module)(config, config.part_spec(spec), *arguments)


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
    speculates = False
    """Whether `step` supports speculative positions, with bitwise the results of single ones. The
    state only stores them once they are accepted."""
    steps_positions = False
    """Whether `step` takes several positions of a text on a CPU, whose kernels loop over them."""
    ends_with_product = False
    """Whether the last layer of `linears` computes the output, which no backward reads."""

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Names of tensors that a window as long as the context does not use."""
        return ()

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: Any = None,
    ) -> BlockOutput:
        """Compute the part's contribution to the residual stream.

        Args:
            x: the stream, (B, T, D).
            norm: norm before the part.
            added: pending addition to x.
            inputs: additional inputs; None if no part reads any.
            state: decoding state, to which the positions are added; B is 1. None for complete
                windows.

        Returns:
            x + added, with the part's output as the new pending addition.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: Any, residual: Tensor | None) -> Tensor:
        """Run the part for one position of a text, (1, 1, D), or of a batch of texts, (B, 1, D).

        With `steps_positions` it also takes several positions of a text, (1, T, D).

        Args:
            x: the stream.
            state: decoding state of the text or of the batch.
            residual: tensor like x to add the output to; None returns the output alone.
        """
        raise NotImplementedError

    def step_texts(self, x: Tensor, norm: nn.Module, inputs: BlockInputs) -> Tensor:
        """Compute the contribution to one position of each text, (B, 1, D), without a state.

        The bits of a text's result depend neither on the other texts nor on their number.
        """
        raise NotImplementedError

    def new_state(self, clock: "PositionCounter") -> "State | None":
        """Create the decoding state of a text; None if positions are independent."""
        raise NotImplementedError(f"generation needs `new_state` of {type(self).__name__}")

    def linears(self) -> tuple[nn.Module, ...]:
        """Return the linear layers in order of use, if they can be decoded in groups."""
        return ()

"""Undo log of decoding states: restores the slots that positions after a mark overwrite.

Each state declares its tensors as `Written`, with the slot that a position writes. Before a
position is read, the contents of its slots are saved. To undo positions, each slot is restored to
its contents before the first undone position that wrote it, so that rings may wrap around any
number of times. Each text of a batch can undo a different number. Everything happens on the device.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Written(NamedTuple):
    """A tensor of a state, with the slot that reading a position writes."""

    tensor: Tensor
    """The tensor; with a leading batch dimension for a batch of texts."""
    slot: Callable[[Tensor], Tensor] | None = None
    """Maps positions of any shape to slots; None if a position writes the complete tensor."""
    dim: int = -2
    """Dimension of the slots, counted from the last one."""

    def rows(self, texts: bool) -> Tensor:
        """View the tensor as (B, slots, ...); e4m3, which torch cannot index, as int8."""
        tensor = self.tensor if texts else self.tensor[None]
        tensor = tensor[:, None] if self.slot is None else tensor.movedim(self.dim, 1)
        return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


class Mark:
    """Saved contents of the slots that later positions overwrite, for states that share a clock.

    Args:
        position: number of positions read, a scalar or (B,) tensor that the clock updates.
        written: tensors of the states.
        positions: maximum number of positions after the mark.
    """

    def __init__(self, position: Tensor, written: Iterable[Written], positions: int) -> None:
        written, is_batch = [*written], position.dim() == 1
        self._position = position.view(-1, 1)
        self._slots = [part.slot for part in written]
        self._rows = [part.rows(is_batch) for part in written]
        self._saved = [rows.new_empty(len(rows), positions, *rows.shape[2:]) for rows in self._rows]
        self._places = self._position.new_empty(len(self._position), positions)
        self._texts = torch.arange(len(self._places), device=position.device)[:, None]

    @property
    def reads_at_once(self) -> bool:
        """Whether several positions may be read at once, as each writes separate slots."""
        return None not in self._slots

    @property
    def nbytes(self) -> int:
        """Memory of the saved contents in bytes."""
        return sum(part.nbytes for part in (self._places, *self._saved))

    def save(self, first: int, length: int) -> None:
        """Save the slots that the next positions overwrite.

        Args:
            first: number of positions read since the mark.
            length: number of positions that are read next.
        """
        span = slice(first, first + length)
        self._places[:, span] = self._position + torch.arange(
            length, dtype=torch.int32, device=self._position.device
        )
        for rows, saved, slots in self._each(span):
            saved[:, span] = rows[self._texts, slots]

    def rewind(self, accepted: Tensor, length: int) -> None:
        """Undo the positions after the accepted ones.

        Args:
            accepted: (B,) int64, number of positions to keep, 0..length.
            length: number of positions read since the mark.
        """
        numbers, accepted = torch.arange(length, device=accepted.device), accepted[:, None]
        self._count_back(accepted, length)
        rejected = (numbers >= accepted)[:, None]  # (B, 1, length)
        for rows, saved, slots in self._each(slice(0, length)):
            if slots.shape[1] < length:  # the complete tensor is one slot
                first = accepted
            else:
                wrote = rejected & (slots[:, :, None] == slots[:, None])
                first = torch.where(wrote, numbers, length).amin(dim=2)
            before = saved[self._texts, first.clamp(max=length - 1)]
            taken = (first < length).view(*first.shape, *(1,) * (rows.dim() - 2))
            rows[self._texts, slots] = torch.where(taken, before, rows[self._texts, slots])

    def _count_back(self, accepted: Tensor, length: int) -> None:
        place = self._places.gather(1, accepted.clamp(max=length - 1))
        self._position.copy_(torch.where(accepted < length, place, self._position))

    def _each(self, span: slice) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Yield the rows of each tensor, their saved contents, and slots, (B, n) int64."""
        places = self._places[:, span].long()
        for rows, saved, slot in zip(self._rows, self._saved, self._slots, strict=True):
            yield rows, saved, torch.zeros_like(places[:, :1]) if slot is None else slot(places)

"""Marks: what positions after a mark write over in states, so that they can be taken back.

Each state declares its tensors as `Written`, with the slot that a position goes to. Before a
position is read, what is in its slots is copied. To take positions back, each slot gets what it had
before the first of them that wrote there. So nothing is left of them, however often a ring has come
round, and each of several texts may take back as many as it likes. It all happens on the device.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Written(NamedTuple):
    """A tensor of a state, and what reading a position writes to it."""

    tensor: Tensor
    """Of several texts, their dimension comes first."""
    slot: Callable[[Tensor], Tensor] | None = None
    """From positions, of any shape, to the slots that they write to; None is all of the tensor."""
    dim: int = -2
    """Dimension of the slots, counted from the last one."""

    def rows(self, texts: bool) -> Tensor:
        """View the tensor as (B, slots, ...), in integers where torch indexes no floats so."""
        tensor = self.tensor if texts else self.tensor[None]
        tensor = tensor[:, None] if self.slot is None else tensor.movedim(self.dim, 1)
        return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


class Mark:
    """Copies of the slots that some positions write over, for states that share a clock.

    Args:
        position: positions that were read, a scalar, or (B,) of several texts; counted elsewhere.
        written: tensors of the states.
        positions: that can be read after the mark.
    """

    def __init__(self, position: Tensor, written: Iterable[Written], positions: int) -> None:
        written, several = [*written], position.dim() == 1
        self._position = position.view(-1, 1)
        self._slots = [part.slot for part in written]
        self._rows = [part.rows(several) for part in written]
        self._saved = [rows.new_empty(len(rows), positions, *rows.shape[2:]) for rows in self._rows]
        self._places = self._position.new_empty(len(self._position), positions)
        self._texts = torch.arange(len(self._places), device=position.device)[:, None]

    @property
    def reads_at_once(self) -> bool:
        """Whether several positions may be read at once: each has slots of its own."""
        return None not in self._slots

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(part.nbytes for part in (self._places, *self._saved))

    def save(self, first: int, length: int) -> None:
        """Copy what positions are about to write over.

        Args:
            first: positions that were read since the mark.
            length: positions that are read next.
        """
        some = slice(first, first + length)
        self._places[:, some] = self._position + torch.arange(
            length, dtype=torch.int32, device=self._position.device
        )
        for rows, saved, slots in self._each(some):
            saved[:, some] = rows[self._texts, slots]

    def rewind(self, accepted: Tensor, length: int) -> None:
        """Take back the positions after those that are accepted.

        Args:
            accepted: (B,) int64, positions that stay, 0..length.
            length: positions that were read since the mark.
        """
        numbers, accepted = torch.arange(length, device=accepted.device), accepted[:, None]
        self._count_back(accepted, length)
        rejected = (numbers >= accepted)[:, None]  # (B, 1, length)
        for rows, saved, slots in self._each(slice(0, length)):
            if slots.shape[1] < length:  # all of a tensor is one slot
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

    def _each(self, some: slice) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """List the rows of each tensor, what is saved of them, and slots, (B, n) int64."""
        places = self._places[:, some].long()
        for rows, saved, slot in zip(self._rows, self._saved, self._slots, strict=True):
            yield rows, saved, torch.zeros_like(places[:, :1]) if slot is None else slot(places)

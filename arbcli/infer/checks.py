"""Several bytes of a text in a step: some are proposed, and the model checks them at once.

A head of the model proposes them, if it has one, and the text itself, where it repeats what was
there before.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_ahead import keep_accepted_, table_of
from arbcli.kernels.output.accept_ahead import accept_ahead_
from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.kernels.output.propose_byte import propose_byte_
from arbcli.kernels.output.repeat_ahead import repeat_ahead_
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.model.cache import Cache
from arbcli.model.language_model import LanguageModel

if TYPE_CHECKING:
    from arbcli.infer.generation import Sampling

EACH_EQUAL = 0.2
"""Added to the logit of a byte that is repeated, for each byte that was equal before it: a head
proposes it sooner the longer the repetition is."""


class Checks:
    """Steps that each propose bytes of a text, check them at once, and accept those that are right.

    All of it happens on the device. The text is the one that is made a byte at a time.

    Args:
        model: that `can_check`.
        cache: of the text.
        size: bytes of a check: the last one of the text, and proposals after it.
    """

    def __init__(self, model: LanguageModel, cache: Cache, size: int) -> None:
        self.size, self._model, self._cache = size, model, cache
        device = model.device
        integers: TensorOptions = {"dtype": torch.int32, "device": device}
        self._ids = torch.zeros(1, size, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(size, dtype=torch.int64, device=device)
        self._repeated = torch.zeros(size, dtype=torch.int64, device=device)
        self._equal = torch.zeros((), **integers)
        self._places = torch.zeros(size, **integers)
        self.accepted = torch.zeros(2, **integers)
        """(2,) int32: positions before the last check, and how many bytes it made."""
        dtype = model.compute_dtype
        self._last = torch.zeros(1, 1, model.config.dim, dtype=dtype, device=device)
        self._table = table_of(cache.kept(size))

    @property
    def nbytes(self) -> int:
        """Bytes of what is not stored yet."""
        return sum(part.new.nbytes for part in self._table.rings)

    @property
    def byte(self) -> Tensor:
        """The last byte of the text, of one element."""
        return self._ids[0, :1]

    def begin(self, byte: Tensor) -> None:
        """Go on from a text whose last byte, of one element, is not read yet."""
        self.byte.copy_(byte.flatten())
        numbers = torch.arange(self.size, dtype=torch.int32, device=byte.device)
        self._places.copy_(self._cache.position + numbers)

    def run(self, text: Tensor, key: Tensor, how: "Sampling") -> None:
        """Do a check; the text gets one byte more at least, and `size` at most.

        Args:
            text: (P,) uint8, with room for `size` bytes.
            key: of the random numbers.
            how: bytes are chosen.
        """
        settings = how.temperature, how.top_k, how.top_p
        position = self._cache.position
        self._propose(text, key, settings)
        logits, rows = self._model.check(self._ids, self._cache)
        choose_byte_(self._chosen, text, logits[0], self._places[1], key, *settings)
        accept_ahead_(
            self._ids[0], self._chosen, rows[0], self._last.view(-1), position, self._places,
            self.accepted,
        )  # fmt: skip
        keep_accepted_(self._table, self.accepted[0], self.accepted[1])

    def _propose(self, text: Tensor, key: Tensor, settings: tuple[float, int, float]) -> None:
        """Propose the bytes after the last one."""
        equal, position, x = self._equal, self._cache.position, self._last
        if self._model.ahead is None:
            repeat_ahead_(self._ids[0, 1:], equal, text, position)
            return
        repeated = self._repeated
        repeat_ahead_(repeated, equal, text, position)
        for number in range(1, self.size):
            byte, place = self._ids[:, number - 1 : number], self._places[number]
            x, logits = self._model.propose(x, byte)
            byte, own = self._ids[0, number : number + 1], repeated[number - 1 : number + 1]
            propose_byte_(byte, own, equal, logits, place, key, EACH_EQUAL, *settings)

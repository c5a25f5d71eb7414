"""Speculative decoding: several bytes are proposed, and the model verifies them in one step.

Proposals come from the model's multi-byte prediction head, if it has one, and from repetitions in
the text.
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

EACH_EQUAL = 0.4
"""Logit bonus of the byte that continues a repetition, for each matching byte before it."""


class Checks:
    """Steps that propose bytes, verify them together, and accept the correct ones.

    The steps run on the device without synchronisation. The text equals that of single-byte steps.

    Args:
        model: a model that `can_check`.
        cache: decoding cache of the text.
        size: bytes per step: the last one of the text and the proposals after it.
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
        """(2,) int32: position before the last step, and number of bytes that it generated."""
        dtype = model.compute_dtype
        self._last = torch.zeros(1, 1, model.config.dim, dtype=dtype, device=device)
        self._table = table_of(cache.kept(size))

    @property
    def nbytes(self) -> int:
        """Size of the buffers of speculative keys and values in bytes."""
        return sum(part.new.nbytes for part in self._table.rings)

    @property
    def byte(self) -> Tensor:
        """The last byte of the text, a tensor of one element."""
        return self._ids[0, :1]

    def begin(self, byte: Tensor) -> None:
        """Start after the last byte of the text, which the cache has not read yet."""
        self.byte.copy_(byte.flatten())
        numbers = torch.arange(self.size, dtype=torch.int32, device=byte.device)
        self._places.copy_(self._cache.position + numbers)

    def run(self, text: Tensor, key: Tensor, sampling: "Sampling") -> None:
        """Run a step, which appends 1 to `size` bytes to the text.

        Args:
            text: (P,) uint8, with room for `size` more bytes.
            key: key of the random numbers.
            sampling: parameters of sampling.
        """
        settings = sampling.temperature, sampling.top_k, sampling.top_p
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

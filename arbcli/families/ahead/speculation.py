"""Speculative decoding: several bytes are proposed, and the model verifies them in one step.

Proposals come from the model's multi-byte prediction head, if it has one, and from repetitions in
the text.
"""

import torch
from torch import Tensor

from arbcli.families.ahead.config import MAX_AHEAD as MAX_AHEAD
from arbcli.families.ahead.kernels.accept_ahead import accept_ahead_
from arbcli.families.ahead.kernels.attend_ahead import keep_accepted_, table_of
from arbcli.families.ahead.kernels.repeat_ahead import repeat_ahead_
from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.model.cache import Cache
from arbcli.model.decoding import fused_logits, fuses
from arbcli.model.language_model import LanguageModel

EACH_EQUAL = 0.4
"""Logit bonus of the byte that continues a repetition, for each matching byte before it."""


@torch.no_grad()
def can_check(model: LanguageModel) -> bool:
    """Return whether `Checks` supports a model; call it within `prepared_weights`.

    It needs fused steps, a single stage and stream whose parts all have `speculates`, no other
    part that reads the text, no holes, and unquantised keys and values.
    """
    main, config = model.config.main, model.config
    others = config.outer, config.beside, config.reads_text, config.composite, config.fills
    if any((*others, main.memories, main.router, main.streams > 1, model.cache_format.code_dtype)):
        return False
    parts = [branch.part for block in model.blocks for branch in block.branches]
    if config.head:
        parts.append(model.byte_mlp)
    x = torch.empty(1, 1, main.dim, dtype=model.compute_dtype, device=model.device)
    return fuses(model, x) and all(part.speculates and part.steps_fused for part in parts)


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
        self._positions = torch.zeros(size, **integers)
        self.accepted = torch.zeros(2, **integers)
        """(2,) int32: position before the last step, and number of bytes that it generated."""
        self._last = torch.zeros(1, 1, model.config.dim, dtype=model.compute_dtype, device=device)
        self._table = table_of(cache.speculative_rings(size))

    @property
    def nbytes(self) -> int:
        """Size of the buffers of speculative keys and values in bytes."""
        return sum(part.new.nbytes for part in self._table.rings)

    @property
    def byte(self) -> Tensor:
        """The last byte of the text, a view of shape (1,) int64."""
        return self._ids[0, :1]

    def begin(self, byte: Tensor) -> None:
        """Start after the last byte of the text, (1, 1) int64, which the cache has not read yet."""
        self.byte.copy_(byte.flatten())
        numbers = torch.arange(self.size, dtype=torch.int32, device=byte.device)
        self._positions.copy_(self._cache.position + numbers)

    def run(self, text: Tensor, key: Tensor, sampling: tuple[float, int, float]) -> None:
        """Run a step, which appends 1 to `size` bytes to the text.

        Args:
            text: (P,) uint8, with room for `size` more bytes.
            key: key of the random numbers, an int32 scalar tensor.
            sampling: temperature, top k and top p.
        """
        position = self._cache.position
        self._propose(text, key, sampling)
        with self._cache.main.clock.reading_speculatively():  # the cache does not advance
            x = self._model.embedding(self._ids, self._model.compute_dtype)
            rows = self._model.blocks.step(x, self._cache.main)
        logits = fused_logits(self._model, rows)  # the bits of single steps
        choose_byte_(self._chosen, text, logits[0], self._positions[1], key, *sampling)
        accept_ahead_(
            self._ids[0], self._chosen, rows[0], self._last.view(-1), position, self._positions,
            self.accepted,
        )  # fmt: skip
        keep_accepted_(self._table, self.accepted[0], self.accepted[1])

    def _propose(self, text: Tensor, key: Tensor, sampling: tuple[float, int, float]) -> None:
        """Propose the bytes after the last one."""
        equal, position, x, head = self._equal, self._cache.position, self._last, self._model.ahead
        if head is None:
            repeat_ahead_(self._ids[0, 1:], equal, text, position)
            return
        repeated, fused = self._repeated, fuses(self._model, x) and head.mlp.steps_fused
        repeat_ahead_(repeated, equal, text, position)
        for number in range(1, self.size):
            byte, place = self._ids[:, number - 1 : number], self._positions[number]
            x, logits = head.step(x, byte) if fused else head(x, byte)
            byte, pair = self._ids[0, number : number + 1], repeated[number - 1 : number + 1]
            choose_byte_(byte, text, logits[0, 0], place, key, *sampling, pair, equal, EACH_EQUAL)

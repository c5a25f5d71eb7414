"""Verification of `arbcli.families.ahead.kernels.propose_byte`."""

import torch
from torch import Tensor

from arbcli.families.ahead.kernels.propose_byte import (
    NONE,
    propose_byte_,
)
from arbcli.kernels.output.choose_byte import MAX_SYMBOLS
from arbcli.verify.kernels.output.choose_byte import choose_byte_reference
from arbcli.verify.verification import Verification


def propose_byte_reference(
    byte: Tensor, repeated: Tensor, equal: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    equal_bonus: float, temperature: float, top_k: int, top_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `propose_byte_` in `byte` and `repeated`."""
    logits, favoured, repeated = logits.clone(), int(repeated[0]), repeated.clone()
    if favoured != NONE.value:
        logits[favoured] += equal_bonus * int(equal)
    text = torch.zeros(int(position) + 1, dtype=torch.uint8)
    byte, _ = choose_byte_reference(byte, text, logits, position, key, temperature, top_k, top_p)
    if int(byte) != favoured:
        repeated[1] = NONE.value
    return byte, repeated


propose_byte_verification = Verification(
    propose_byte_, propose_byte_reference, compared=("byte", "repeated"),
    sizes={"V": f"min(k + 1, {MAX_SYMBOLS})"},
    values={
        "repeated": (-1, "V - 1"), "equal": (0, 16),
        "logits": lambda rng, *shape: 4 * rng.reals(*shape), "position": (0, 9),
        "equal_bonus": (0.0, 0.25, 1.0), "temperature": (0.0, 0.5, 1.0, 2.0),
        "top_k": ("1", "(V + 1) // 2", "V"), "top_p": (1.0, 0.9, 0.3),
    },
)  # fmt: skip

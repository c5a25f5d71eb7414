"""Verification of `arbcli.kernels.output.choose_byte`."""

import math
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.output.choose_byte import MAX_SYMBOLS, choose_byte_
from arbcli.verify.kernels.update.random_bits import mix_reference
from arbcli.verify.verification import Verification


def choose_byte_reference(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: float,
    top_k: int, top_p: float, repeated: Tensor | None = None, equal: Tensor | None = None,
    equal_bonus: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the outputs of `choose_byte_` with Python floats."""
    if repeated is not None and equal is not None:
        logits, favoured, repeated = logits.clone(), int(repeated[0]), repeated.clone()
        if favoured >= 0:
            logits[favoured] += equal_bonus * int(equal)
        byte, text = choose_byte_reference(
            byte, text, logits, position, key, temperature, top_k, top_p
        )
        if int(byte) != favoured:
            repeated[1] = -1
        return byte, text, repeated
    if logits.dim() == 2:
        choices = []
        for row, row_logits in enumerate(logits):
            chosen, text = choose_byte_reference(
                byte.view(-1)[:1], text, row_logits, position + row, key, temperature, top_k, top_p
            )
            choices.append(chosen)
        return torch.cat(choices).view_as(byte), text
    logit, place = logits.tolist(), int(position)
    order = sorted(range(len(logit)), key=lambda i: (-logit[i], i))
    choice = order[0]
    if temperature > 0:
        score = {i: (logit[i] - logit[order[0]]) / temperature for i in order[:top_k]}
        total, before, noisy = sum(map(math.exp, score.values())), 0.0, {}
        for i in score:
            if before >= top_p * total and top_p < 1:
                break
            word = mix_reference(i * 0x9E3779B9 % 2**32 ^ mix_reference((place ^ int(key)) % 2**32))
            noisy[i] = score[i] - math.log(-math.log(((word >> 9) + 0.5) / 2**23))
            before += math.exp(score[i])
        choice = max(noisy, key=noisy.__getitem__)
    byte, text = torch.full_like(byte, choice), text.clone()
    text[place] = choice
    return byte, text


LOGITS_CHANGED: dict[str, dict[str, Any]] = {
    "all equal": {"logits": torch.zeros_like},
    "some equal": {"logits": torch.round},
    "some excluded": {"logits": lambda x: torch.where(x > 0, x, -torch.inf)},
}
choose_byte_verification = Verification(
    choose_byte_, choose_byte_reference,
    changed=LOGITS_CHANGED,
    compared=("byte", "text", "repeated"),
    sizes={
        # mostly several rows; a repetition needs a single byte
        "M": ("()", *["(min(m, 8),)"] * 6), "B": "M or (1,)", "V": f"min(k + 1, {MAX_SYMBOLS})",
        "P": "n + 20",
    },
    values={
        "byte": (0, 127), "logits": lambda rng, *shape: 4 * rng.reals(*shape),
        "position": (0, 9), "temperature": (0.0, 0.5, 1.0, 2.0),
        "top_k": ("1", "(V + 1) // 2", "V"), "top_p": (1.0, 0.9, 0.3),
        "repeated": (-1, "V - 1"), "equal": (0, 16), "equal_bonus": (0.0, 0.25, 1.0),
    },
)  # fmt: skip

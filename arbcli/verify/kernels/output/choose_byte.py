"""Verification of `arbcli.kernels.output.choose_byte`."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.output.choose_byte import (
    MAX_SYMBOLS,
    choose_byte_,
    choose_byte_torch,
)
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.verify.kernels.update.random_bits import mix_reference
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


def choose_byte_reference(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: float,
    top_k: int, top_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `choose_byte_` in `byte` and `text`, with Python floats."""
    if logits.dim() == 2:
        choices = []
        for row, row_logits in enumerate(logits):
            one, text = choose_byte_reference(
                byte.view(-1)[:1], text, row_logits, position + row, key, temperature, top_k, top_p
            )
            choices.append(one)
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


CHOICES = ((0.0, 256, 1.0), (1.0, 256, 1.0), (0.7, 5, 1.0), (1.3, 256, 0.5), (4.0, 6, 0.3),
           (1.0, 1, 1.0), (1.0, 256, 1e-6))  # fmt: skip
"""(temperature, top_k, top_p)."""


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    random = 3 * torch.randn(256, generator=generator)
    kinds = {"random": random, "33 symbols": random[:33], "one": random[:1],
             "all equal": torch.zeros(256), "some equal": random.round(),
             "some excluded": torch.where(random > 0, random, -torch.inf)}  # fmt: skip
    several = 3 * torch.randn(8, 256, generator=generator)
    kinds |= {"8 rows": several, "2 rows of 33 symbols": several[:2, :33].contiguous(),
              "5 rows, some equal": several[:5].round()}  # fmt: skip
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        kinds |= {"bf16": random.bfloat16(), "3 rows bf16": several[:3].bfloat16()}
    place: TensorOptions = {"dtype": torch.int32, "device": device}
    for number, (kind, logits) in enumerate(kinds.items()):
        for choice in CHOICES:
            byte = torch.full((1, 1) if logits.dim() == 1 else (len(logits),), 300)
            text = torch.arange(20, dtype=torch.uint8)
            position = torch.tensor(number, **place)
            key = torch.tensor(-(7**number) - int(100 * choice[0]), **place)
            tensors = (part.to(device) for part in (byte, text, logits))
            yield Case(f"{kind}, {choice}", (*tensors, position, key, *choice))


choose_byte_verification = Verification(
    choose_byte_, choose_byte_reference, _cases, compared=("byte", "text"),
    sizes={
        "M": ("()", "(min(m, 8),)"), "B": "M or (1,)", "V": f"min(k + 1, {MAX_SYMBOLS})",
        "P": "n + 20",
    },
    timed=[Timed("256 logits", choose_byte_torch, "torch, step by step", B=(1, 1), P=9, M=(), V=256,
                 logits=torch.float32, position=0, key=0, temperature=0.8, top_k=40, top_p=0.95)],
    values={
        "byte": (0, 127), "logits": lambda rng, *shape: 4 * rng.reals(*shape),
        "position": (0, 9), "temperature": (0.0, 0.5, 1.0, 2.0),
        "top_k": ("1", "(V + 1) // 2", "V"), "top_p": (1.0, 0.9, 0.3),
    },
)  # fmt: skip

"""Verification of `arbcli.kernels.output.choose_bytes`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from arbcli.kernels.output.choose_byte import (
    MAX_SYMBOLS,
)
from arbcli.kernels.output.choose_bytes import (
    choose_bytes_,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.output.choose_byte import CHOICES, choose_byte_reference
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


def choose_bytes_reference(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `choose_bytes_` in `byte` and `text`, one text at a time."""
    rows = zip(
        byte, text, logits, position, key,
        temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True,
    )  # fmt: skip
    results = [choose_byte_reference(*row) for row in rows]
    chosen, texts = zip(*results, strict=True)
    return torch.stack(chosen), torch.stack(texts)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    texts = len(CHOICES)
    random = 3 * torch.randn(texts, 256, generator=generator)
    kinds = {"random": random, "33 symbols": random[:, :33].contiguous(),
             "some equal": random.round(), "all equal": torch.zeros(texts, 5),
             "some excluded": torch.where(random > 0, random, -torch.inf)}  # fmt: skip
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        kinds["bf16"] = random.bfloat16()
    for number, (kind, logits) in enumerate(kinds.items()):
        index = torch.arange(texts, dtype=torch.int32)
        heat, top_k, top_p = zip(*CHOICES, strict=True)
        inputs = (
            torch.full((texts, 1), 300), torch.arange(9 * texts).view(texts, 9).byte(), logits,
            (index + number) % 9, -(7**number) - 1000 * index,
            torch.tensor(heat), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p),
        )  # fmt: skip
        yield Case(kind, tuple(part.to(device) for part in inputs))


def _picked(*values: float) -> Callable[[CaseGenerator, int], Tensor]:
    """Draw a tensor whose elements are picked from a sequence."""
    return lambda rng, texts: torch.tensor(
        [rng.pick(values) for _ in range(texts)], device=rng.device
    )


choose_bytes_verification = Verification(
    choose_bytes_, choose_bytes_reference, _cases, compared=("byte", "text"),
    sizes={"B": "1 + m % 5", "V": f"min(k + 1, {MAX_SYMBOLS})", "P": "n"}, needs_rows=False,
    timed=[Timed("64x256 logits", lambda *arguments: torch.multinomial(arguments[2].softmax(1), 1),
                 "torch's multinomial", B=64, P=9, V=256, logits=torch.float32, position=0,
                 temperature=0.95, top_k=40, top_p=0.95)],
    values={
        "logits": lambda rng, *shape: 4 * rng.reals(*shape), "position": (0, "P - 1"),
        "temperature": _picked(0.0, 0.5, 1.0, 2.0), "top_k": (1, "V"),
        "top_p": _picked(1.0, 0.9, 0.3),
    },
)  # fmt: skip

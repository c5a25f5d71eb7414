"""Verification of `arbcli.kernels.output.choose_bytes`."""

from collections.abc import Callable

import torch
from torch import Tensor

from arbcli.kernels.output.choose_byte import MAX_SYMBOLS
from arbcli.kernels.output.choose_bytes import choose_bytes_
from arbcli.verify.kernels.output.choose_byte import LOGITS_CHANGED, choose_byte_reference
from arbcli.verify.verification import CaseGenerator, Verification


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


def _draw_choices(*values: float) -> Callable[[CaseGenerator, int], Tensor]:
    """Return a function that draws a tensor whose elements are picked from `values`."""
    return lambda rng, texts: torch.tensor(
        [rng.pick(values) for _ in range(texts)], device=rng.device
    )


choose_bytes_verification = Verification(
    choose_bytes_, choose_bytes_reference,
    changed=LOGITS_CHANGED,
    compared=("byte", "text"),
    sizes={"B": "1 + m % 5", "V": f"min(k + 1, {MAX_SYMBOLS})", "P": "n"}, needs_rows=False,
    values={
        "logits": lambda rng, *shape: 4 * rng.reals(*shape), "position": (0, "P - 1"),
        "temperature": _draw_choices(0.0, 0.5, 1.0, 2.0), "top_k": (1, "V"),
        "top_p": _draw_choices(1.0, 0.9, 0.3),
    },
)  # fmt: skip

"""Verification of `arbcli.kernels.update.unit_rows`."""

from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.update.unit_rows import unit_rows
from arbcli.verify.verification import CaseGenerator, Gate, Verification, with_one


def unit_rows_reference(values: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the result of `unit_rows` and its `ok`, in float64."""
    gain = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for n, row in enumerate(values.double()):
        mean_square = float((row * row).mean())
        if not mean_square < float("inf"):
            ok = ok * 0
        elif mean_square > 0:
            gain[n] = 2**16 / mean_square**0.5
    rows = int((gain > 0).sum())
    return gain * (len(gain) / max(rows, 1)) ** 0.5, ok


def _draw_values(rng: CaseGenerator, rows: int, columns: int) -> Tensor:
    values = rng.reals(rows, columns)
    if rng.chance(0.3):
        values[:: 1 + rng.integer(3)] = 0
    return values


_CHANGED: dict[str, dict[str, Any]] = {
    "zeros": {"values": torch.zeros_like}, "tiny": {"values": lambda x: x * 1e-9},
    "infinite": {"values": with_one(torch.inf)}, "not a number": {"values": with_one(torch.nan)},
}  # fmt: skip
unit_rows_verification = Verification(
    unit_rows, unit_rows_reference,
    shapes=((1, 1300, 3),),
    changed=_CHANGED,
    gate=Gate(relative=1e-5, reason="float32 sums of thousands of squares"), compared=("ok",),
    values={"values": _draw_values, "ok": lambda rng: rng.scalar(1)},
)  # fmt: skip

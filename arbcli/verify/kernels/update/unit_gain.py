"""Verification of `arbcli.kernels.update.unit_gain`."""

import math

import torch
from torch import Tensor

from arbcli.kernels.update.unit_gain import unit_gain
from arbcli.verify.kernels.update.direction import draw_gains
from arbcli.verify.verification import Gate, Verification


def unit_gain_reference(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the result of `unit_gain` and its `ok`, in float64."""
    values = values.double()
    rows = values.new_ones(len(values)) if row_gain is None else row_gain.double()
    u = values * rows[:, None] * (1 if column_gain is None else column_gain.double())
    mean_square = float(u.square().mean())
    usable = 0 < mean_square < math.inf
    gain = 2**16 / math.sqrt(mean_square) if usable else 0.0
    return rows * gain, ok * usable


unit_gain_verification = Verification(
    unit_gain, unit_gain_reference,
    changed={
        "zeros": {"values": torch.zeros_like}, "tiny": {"values": lambda x: x * 1e-9},
        "not finite": {"values": lambda x: x / 0},
    },
    gate=Gate(relative=1e-5, reason="float32 sums of millions of squares"), compared=("ok",),
    draw=lambda rng, g, m, n, k: (rng.reals(n, k), *draw_gains(rng, n, k, 1.0), rng.scalar(1)),
    needs_rows=False,
)  # fmt: skip

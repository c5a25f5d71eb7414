"""Verification of `arbcli.kernels.update.unit_gain`."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import normals
from arbcli.kernels.update.unit_gain import (
    unit_gain,
)
from arbcli.verify.kernels.update.direction import draw_gains
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Gate, Verification


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


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    normal = normals(generator, device)

    def ok() -> Tensor:
        return torch.ones((), dtype=torch.int32, device=device)

    for rows, columns in ((1, 1), (3, 33), (17, 259)):
        gains = normal(rows).exp(), normal(columns).exp()
        yield Case(f"{rows}x{columns}", (normal(rows, columns), *gains, ok()))
    yield Case("17x259 no gains", (normal(17, 259) * 1e-9, None, None, ok()))
    yield Case("259x17 transposed", (normal(17, 259).T, gains[1], gains[0], ok()))
    yield Case("17x129 strided", (normal(17, 259)[:, 1::2], None, None, ok()))
    yield Case("17x259 zero", (normal(17, 259) * 0, *gains, ok()))
    yield Case("17x259 not finite", (normal(17, 259) / 0, *gains, ok()))
    if device.type == "cuda":  # the interpreter's bf16 is wrong, and slow
        yield Case("2049x2080 bf16", (normal(2049, 2080).bfloat16(), None, None, ok()))


unit_gain_verification = Verification(
    unit_gain, unit_gain_reference, _cases,
    Gate(relative=1e-5, reason="float32 sums of millions of squares"), compared=("ok",),
    draw=lambda rng, g, m, n, k: (rng.reals(n, k), *draw_gains(rng, n, k, 1.0), rng.scalar(1)),
    needs_rows=False,
    timed=[Timed("11264x2048 bf16", **MATRIX_SIZES, row_gain=1, column_gain=1, ok=1)],
)  # fmt: skip

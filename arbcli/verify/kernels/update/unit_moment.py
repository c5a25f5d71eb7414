"""Verification of `arbcli.kernels.update.unit_moment`."""

import math

import torch
from torch import Tensor

from arbcli.kernels.update.unit_moment import unit_moment
from arbcli.verify.verification import CaseGenerator, Verification


def unit_moment_reference(moment: Tensor, squares: Tensor, out: Tensor) -> Tensor:
    """Compute the reference result of `unit_moment` in `out`, in float64 rounded twice."""
    norm = torch.tensor(math.sqrt(squares.to(torch.float32))).to(out.device, out.dtype)
    if not squares:
        return torch.zeros_like(out)
    return (moment.double() / norm.double()).to(torch.float32).to(out.dtype)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    moment = rng.integers(-127, 127, n, k)
    return moment, moment.long().square().sum() * (not rng.chance(0.1)), rng.reals(n, k)


unit_moment_verification = Verification(
    unit_moment, unit_moment_reference,
    changed={
        "zeros": {"moment": torch.zeros_like, "squares": torch.zeros_like},
        "refused": {"squares": torch.zeros_like},
    },
    compared=("out",), draw=_draw, needs_rows=False,
)  # fmt: skip

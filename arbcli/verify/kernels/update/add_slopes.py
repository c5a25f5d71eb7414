"""Verification of `arbcli.kernels.update.add_slopes`."""

import torch
from torch import Tensor

from arbcli.kernels.update.add_slopes import add_slopes
from arbcli.verify.verification import CaseGenerator, Verification, filled


def add_slopes_reference(
    total: Tensor, slope: Tensor, slope_gain: Tensor, weight: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the new total in int64, and the sum of its squares."""
    new = total.to(torch.int64)
    if ok:
        unit = (slope * slope_gain).clamp(-16 * 2**16, 16 * 2**16)
        new = new + torch.round(unit * (weight.float() / 2**21)).to(torch.int64)
    new = new.clamp(-(2**15 - 1), 2**15 - 1)
    return new.to(torch.int16), (new * new).sum()


add_slopes_verification = Verification(
    add_slopes, add_slopes_reference,
    changed={
        "refused": {"ok": torch.zeros_like, "slope": filled(torch.nan)},
        "clipped": {"slope": filled(1e30)},
    },
    compared=lambda inputs, squares: (inputs[0], squares.sum().to(torch.int64)), sizes={"G": "k"},
    values={
        "total": (-(2**15 - 1), 2**15 - 1),
        "slope_gain": lambda rng: rng.real(rng.pick((2.0**8, 2.0**16))),
        "weight": (0, 2**16), "ok": CaseGenerator.ok,
    },
)  # fmt: skip

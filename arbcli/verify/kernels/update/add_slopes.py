"""Verification of `arbcli.kernels.update.add_slopes`."""

import torch
from torch import Tensor

from arbcli.kernels.update.add_slopes import add_slopes
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Gate, Verification, filled


def add_slopes_reference(
    total: Tensor, slope: Tensor, slope_gain: Tensor, weight: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the new total and the sum of its squares, in float64."""
    new = total.double()
    if ok:
        unit = slope.double() * slope_gain.double()
        new = new + unit.clamp(-3 * 2**16, 3 * 2**16) * weight.double() / 2**16
    return new, new.square().sum()


add_slopes_verification = Verification(
    add_slopes, add_slopes_reference,
    gate=Gate(relative=1e-6, reason="two float32 roundings of each element"),
    changed={
        "refused": {"ok": torch.zeros_like, "slope": filled(torch.nan)},
        "clipped": {"slope": filled(1e30)},
    },
    compared=lambda inputs, squares: (inputs[0], squares.sum()), sizes={"G": "k"},
    timed=[Timed("11264x64", N=11264, G=64, total=2.0**16, slope_gain=2.0**16, weight=2**14)],
    values={
        "slope_gain": lambda rng: rng.real(rng.pick((2.0**8, 2.0**16))),
        "weight": (0, 2**16), "ok": CaseGenerator.ok,
    },
)  # fmt: skip

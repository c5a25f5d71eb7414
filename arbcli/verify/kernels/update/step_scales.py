"""Verification of `arbcli.kernels.update.step_scales`."""

import torch
from torch import Tensor

from arbcli.kernels.update.step_scales import step_scales
from arbcli.verify.kernels.update.random_bits import random_bits_reference
from arbcli.verify.verification import REFUSED, CaseGenerator, Verification, filled


def step_scales_reference(
    exponent: Tensor, fraction: Tensor, slope: Tensor, slope_gain: Tensor, key: Tensor,
    gain: Tensor, shift: Tensor, ok: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `step_scales` in `exponent` and `fraction`, in int64."""
    if not ok:
        return exponent, fraction
    v = exponent.to(torch.int64) * 128 + fraction.to(torch.int64)
    s = torch.round((slope * slope_gain).clamp(-3 * 2**16, 3 * 2**16)).to(torch.int64)
    step = torch.div(s * gain.to(torch.int64), 2 ** int(shift), rounding_mode="floor")
    random = random_bits_reference(int(key), *v.shape).to(v.device) % 2**16
    v = v - torch.div(step + random, 2**16, rounding_mode="floor")
    v = v.clamp(-96 * 128, 31 * 128 + 127)
    octave = torch.div(v, 128, rounding_mode="floor")
    return octave.to(torch.int8), (v - octave * 128).to(torch.int8)


def _draw_slope_gain(rng: CaseGenerator) -> Tensor:
    return rng.real(rng.pick((2.0**8, 2.0**16, 3e19)))


step_scales_verification = Verification(
    step_scales, step_scales_reference,
    changed=REFUSED | {
        "lowest": {"exponent": filled(-96), "slope": filled(30000), "slope_gain": filled(2**16)},
        "highest": {"exponent": filled(31), "slope": filled(-30000), "slope_gain": filled(2**16)},
        "halfway": {
            "slope": lambda x: (2 * x).round() / 2, "slope_gain": torch.ones_like,
            "gain": torch.ones_like, "shift": torch.zeros_like,
        },
    },
    compared=("exponent", "fraction"), sizes={"G": "k"},
    values={
        "exponent": (-96, 31), "fraction": (0, 127), "slope_gain": _draw_slope_gain,
        "gain": (0, 2**12), "shift": (0, 19), "ok": CaseGenerator.ok,
    },
)  # fmt: skip

"""Verification of `arbcli.kernels.update.step_scales`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.update.step_scales import (
    step_scales,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.update.random_bits import random_bits_reference
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


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


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def scalars(*values: int) -> list[Tensor]:
        return [torch.tensor(value, dtype=torch.int32, device=device) for value in values]

    unit = torch.tensor(21000.0, device=device)
    control = (unit, *scalars(-77, 4000, 10, 1))
    for shape in ((1, 1), (3, 33), (33, 41), (2, 1311)):
        exponent = torch.randint(-96, 32, shape, generator=generator, dtype=torch.int8).to(device)
        fraction = torch.randint(0, 128, shape, generator=generator, dtype=torch.int8).to(device)
        slope = 3 * torch.randn(shape, generator=generator).to(device)
        yield Case(f"{shape[0]}x{shape[1]}", (exponent, fraction, slope, *control))
    yield Case("2x1311 refused", (exponent, fraction, slope, *control[:4], *scalars(0)))
    extreme = torch.full_like(slope, 1e30)
    for sign, limit in ((1, -96), (-1, 31)):
        ends = torch.full_like(exponent, limit)
        yield Case(f"2x1311 E = {limit}", (ends, fraction, sign * extreme, *control))
    halves = torch.randint(-9, 10, shape, generator=generator).to(device) / 2
    whole = (torch.ones_like(unit), *scalars(9, 1, 0, 1))
    yield Case("2x1311 halfway", (exponent, fraction, halves, *whole))
    yield Case("1x437 strided", (exponent[1:, ::3], fraction[1:, ::3], slope[1:, 1::3], *control))


def _draw_slope_gain(rng: CaseGenerator) -> Tensor:
    return rng.real(rng.pick((2.0**8, 2.0**16, 3e19)))


step_scales_verification = Verification(
    step_scales, step_scales_reference, _cases, compared=("exponent", "fraction"), sizes={"G": "k"},
    timed=[Timed("11264x64", N=11264, G=64, exponent=(0, 15), fraction=(0, 15), slope_gain=2.0**16,
                 gain=4000, shift=10)],
    values={
        "exponent": (-96, 31), "fraction": (0, 127), "slope_gain": _draw_slope_gain,
        "gain": (0, 2**12), "shift": (0, 19), "ok": CaseGenerator.ok,
    },
)  # fmt: skip

"""Verification of `arbcli.kernels.update.add_slopes`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.update.add_slopes import add_slopes
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Gate, Verification


def add_slopes_reference(
    total: Tensor, slope: Tensor, slope_gain: Tensor, weight: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the new total and the sum of its squares, in float64."""
    new = total.double()
    if ok:
        unit = slope.double() * slope_gain.double()
        new = new + unit.clamp(-3 * 2**16, 3 * 2**16) * weight.double() / 2**16
    return new, new.square().sum()


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    gain = torch.tensor(21000.0, device=device)
    weight, ok = (torch.tensor(n, dtype=torch.int32, device=device) for n in (2**14, 1))
    for shape in ((1, 1), (9, 33), (2, 1311)):
        total = 9000 * torch.randn(shape, generator=generator).to(device)
        slope = 3 * torch.randn(shape, generator=generator).to(device)
        yield Case(f"{shape[0]}x{shape[1]}", (total, slope, gain, weight, ok))
    yield Case("2x1311 refused", (total, slope * torch.nan, gain, weight, ok * 0))
    yield Case("2x1311 clipped", (total, slope * 1e30, gain, weight, ok))
    yield Case("1x437 strided", (total[1:, ::3], slope[1:, 1::3], gain, weight, ok))


add_slopes_verification = Verification(
    add_slopes, add_slopes_reference, _cases,
    Gate(relative=1e-6, reason="two float32 roundings of each element"),
    compared=lambda inputs, squares: (inputs[0], squares.sum()), sizes={"G": "k"},
    timed=[Timed("11264x64", N=11264, G=64, total=2.0**16, slope_gain=2.0**16, weight=2**14)],
    values={
        "slope_gain": lambda rng: rng.real(rng.pick((2.0**8, 2.0**16))),
        "weight": (0, 2**16), "ok": CaseGenerator.ok,
    },
)  # fmt: skip

"""Verification of `arbcli.kernels.matmul.quantise_rows`."""

import torch
from torch import Tensor

from arbcli.kernels.matmul.quantise_rows import WHOLE_ROW, quantise_rows
from arbcli.verify.verification import CaseGenerator, Verification


def round_e4m3_reference(values: Tensor) -> Tensor:
    """Round float64 of magnitude below 448 to the nearest e4m3 number, ties to even."""
    octave = torch.frexp(values).exponent - 1
    step = torch.exp2((octave.clamp(min=-6) - 3).double())
    return (torch.round(values / step) * step).to(torch.float32)


def quantise_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `quantise_rows`, with q in float32."""
    values = x.double()
    largest = values.abs().amax(dim=1, keepdim=True)
    octave = (torch.frexp(largest).exponent - 1).clamp(min=-119)
    scale = torch.exp2((octave - 7).double())
    scale[largest == 0] = 2.0**-126
    return round_e4m3_reference(values / scale), scale.to(torch.float32)


def codes_to_float32(_inputs: tuple, results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (q, scale) with q in float32, for comparisons."""
    return results[0].float(), results[1]


def draw_of_any_size(rng: CaseGenerator, *shape: int) -> Tensor:
    """Draw normal numbers, in some cases all very small or all very large."""
    values = rng.reals(*shape) * rng.pick((1.0, 2.0**-40, 2.0**40))
    if values.numel() and rng.chance(0.4):  # the largest element of a row is its first or last
        values[:, rng.pick((0, -1))] *= 64
    return rng.view(values)


quantise_rows_verification = Verification(
    quantise_rows, quantise_rows_reference,
    shapes=((0, 1, 7), (2, 1, WHOLE_ROW + 3)),
    changed={
        "zeros": {"x": torch.zeros_like}, "smallest": {"x": lambda x: x * 2.0**-130},
        "largest": {"x": lambda x: x / x.abs().max() * 2.0**127},
        "ties": {"x": lambda x: torch.arange(2048)[None].to(x) * 2.0**-11},
    },
    compared=codes_to_float32,
    values={"x": draw_of_any_size},
)  # fmt: skip

"""Verification of `arbcli.kernels.matmul.quantise_rows`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.matmul.quantise_rows import (
    E4M3,
    WHOLE_ROW,
    quantise_rows,
)
from arbcli.kernels.runtime.arguments import placed
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


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


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        x = torch.randn(rows, columns, generator=generator)
        return x * 2.0 ** torch.randint(-16, 1, x.shape, generator=generator)

    for rows, columns in ((1, 1), (3, 33), (5, 704)):
        yield Case(f"{rows}x{columns}", (draw(rows, columns).to(device),))
    wide = draw(2, WHOLE_ROW + 3)
    wide[0, 0] = wide[1, -1] = 9  # the largest element is in the first or last iteration
    yield Case(f"2x{WHOLE_ROW + 3}", (wide.to(device),))
    few = draw(4, 66)
    yield Case("4x33 strided", (placed(few[:, ::2], device),))
    yield Case("4x66 zeros", (torch.zeros_like(few).to(device),))
    yield Case("4x66 the smallest", ((few * 2.0**-130).to(device),))
    yield Case("4x66 the largest", ((few * 2.0**124).to(device),))
    steps = torch.arange(0, 2048).float()  # every value, every tie
    yield Case("1x2048 ties", ((steps * 2.0**-11)[None].to(device),))
    yield Case("0x7", (few[:0, :7].to(device),))


def codes_to_float32(_inputs: tuple, results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (q, scale) with q in float32, for comparisons."""
    return results[0].float(), results[1]


def draw_of_any_size(rng: CaseGenerator, *shape: int) -> Tensor:
    """Draw normal numbers, in some cases all very small or all very large."""
    return rng.view(rng.reals(*shape) * rng.pick((1.0, 2.0**-40, 2.0**40)))


quantise_rows_verification = Verification(
    quantise_rows, quantise_rows_reference, _cases, compared=codes_to_float32,
    timed=[
        Timed(f"16384x{columns}", lambda x: x.to(E4M3), "torch's cast", M=16384, D=columns)
        for columns in (2048, 11264)
    ],
    values={"x": draw_of_any_size},
)  # fmt: skip

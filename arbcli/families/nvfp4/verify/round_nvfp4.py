"""Verification of `arbcli.families.nvfp4.kernels.round_nvfp4`."""

from typing import Any

import torch
from torch import Tensor

from arbcli.families.nvfp4.kernels.round_nvfp4 import NUMBERS, round_nvfp4
from arbcli.verify.kernels.matmul.quantise_rows import draw_of_any_size, round_e4m3_reference
from arbcli.verify.verification import Verification


def round_nvfp4_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `round_nvfp4` in float64, 16 columns at a time."""
    largest = x.double().abs().max() if x.numel() else x.new_zeros((), dtype=torch.float64)
    octave = max(int(torch.frexp(largest).exponent) - 1, -116) if largest > 0 else -116
    values = x.double() / 2.0 ** (octave - 10)
    y, even = torch.empty_like(values), torch.arange(8, device=x.device) % 2 == 0
    numbers = torch.tensor(NUMBERS, dtype=torch.float64, device=x.device)
    for first in range(0, x.shape[1], 16):
        part = values[:, first : first + 16]
        sixth = (part.abs().amax(dim=1, keepdim=True).float() * (1 / 6)).clamp(max=448)
        s = round_e4m3_reference(sixth.double()).double()
        distance = (part.abs()[..., None] - s[..., None] * numbers).abs()
        nearest = distance == distance.amin(dim=-1, keepdim=True)
        code = (2 * nearest + even).argmax(dim=-1)
        y[:, first : first + 16] = part.sign() * numbers[code] * s
    return y.to(x.dtype), torch.tensor([2.0 ** (octave - 10)], device=x.device)


TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -2.5, -5, 0, 1, 2, 3, 4)
_CHANGED: dict[str, dict[str, Any]] = {
    "zeros": {"x": torch.zeros_like}, "smallest": {"x": lambda x: x * 2.0**-120},
    "trits": {"x": lambda x: x.sign() * 0.0371},
    "all sizes": {"x": lambda x: x.sign() * torch.exp2(20 * x / x.abs().max())},
    "ties": {"x": lambda x: x.new_tensor(TIES) * x.new_tensor((1, 2, 0.5, 1.75))[:, None]},
}  # fmt: skip
round_nvfp4_verification = Verification(
    round_nvfp4, round_nvfp4_reference, shapes=((0, 1, 32),), changed=_CHANGED,
    torch_is_peer=True,
    values={"x": draw_of_any_size},
)  # fmt: skip

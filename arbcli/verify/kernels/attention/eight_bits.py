"""References and random inputs for `arbcli.kernels.attention.eight_bits`."""

import torch
from torch import Tensor

from arbcli.kernels.attention.eight_bits import ROOM
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.verify.kernels.matmul.quantise_rows import round_e4m3_reference


def decode_entries_reference(codes: Tensor, exponents: Tensor) -> Tensor:
    """Compute the reference result of `decode_entries`, in float64."""
    return torch.ldexp(codes.double(), exponents[..., None].int() + 1 - ROOM[codes.dtype])


def round_entries_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `round_entries` for float64 entries, (..., d)."""
    octave = torch.frexp(x.abs().amax(-1, True)).exponent - 1
    scale = torch.exp2((octave.clamp(min=-119) - ROOM[dtype]).double())
    if dtype == E4M3:
        return round_e4m3_reference(x / scale).double() * scale
    return torch.round(x / scale).clamp(max=127) * scale

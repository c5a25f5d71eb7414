"""Verification of `arbcli.kernels.codec.decode_e4m3`."""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_e4m3 import decode_e4m3
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference
from arbcli.verify.kernels.codec.packed import SPECIAL_WEIGHTS
from arbcli.verify.kernels.matmul.quantise_rows import codes_to_float32, round_e4m3_reference
from arbcli.verify.verification import Verification


def decode_e4m3_reference(
    packed: Packed, transposed: bool, turn: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `decode_e4m3`, with q in float32."""
    octave = packed.exponent.max().double() - (7 if packed.remainder is None else 6)
    weight = decode_digits_reference(packed).double() * torch.exp2(-octave)
    if packed.remainder is not None and turn is not None:
        weight = _dither_reference(weight, int(turn))
    weight = weight.T if transposed else weight
    scale = torch.exp2(octave).expand(1, len(weight)).to(torch.float32)
    return round_e4m3_reference(weight), scale


def _dither_reference(weight: Tensor, turn: int) -> Tensor:
    """Round a float64 matrix down to three mantissa bits after adding its thresholds."""
    n, k = (torch.arange(size, device=weight.device) for size in weight.shape)
    turns = n[:, None] * 0x91E10DA5 + k * 0xC13FA9A9 + turn * 2**16  # in units of 2**-32
    threshold = (turns % 2**32 // 2**12).double() / 2**20
    step = torch.exp2((torch.frexp(weight).exponent - 4).double())
    return weight.sign() * torch.floor(weight.abs() / step + threshold) * step


def draw_turn(rng: CaseGenerator) -> Tensor | None:
    """Draw the offset of thresholds, or None for rounding to nearest."""
    return rng.pick((None, rng.scalar(rng.integer(2**16))))


decode_e4m3_verification = Verification(
    decode_e4m3, decode_e4m3_reference,
    changed=SPECIAL_WEIGHTS,
    compared=codes_to_float32,
    scale_path=has_planes,
    values={"packed": {"spread": 12}, "transposed": (False, True), "turn": draw_turn},
)  # fmt: skip

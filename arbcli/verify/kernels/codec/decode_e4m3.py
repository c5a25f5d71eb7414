"""Verification of `arbcli.kernels.codec.decode_e4m3`."""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_e4m3 import decode_e4m3
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference
from arbcli.verify.kernels.codec.packed import SPECIAL_WEIGHTS
from arbcli.verify.kernels.matmul.quantise_rows import codes_to_float32, round_e4m3_reference
from arbcli.verify.verification import Verification


def decode_e4m3_reference(packed: Packed, transposed: bool) -> tuple[Tensor, Tensor]:
    """Compute `decode_e4m3`, with q in float32."""
    weight = decode_digits_reference(packed).double()
    weight = weight.T if transposed else weight
    octave = packed.exponent.max().double() - (7 if packed.remainder is None else 6)
    scale = torch.exp2(octave).expand(1, len(weight)).to(torch.float32)
    return round_e4m3_reference(weight * torch.exp2(-octave)), scale


decode_e4m3_verification = Verification(
    decode_e4m3, decode_e4m3_reference,
    changed=SPECIAL_WEIGHTS,
    compared=codes_to_float32,
    scale_path=has_planes,
    values={"packed": {"spread": 12}, "transposed": (False, True)},
)  # fmt: skip

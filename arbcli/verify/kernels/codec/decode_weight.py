"""Verification of `arbcli.kernels.codec.decode_weight`."""

from arbcli.kernels.codec.decode_digits import decode_digits_native, decode_digits_torch
from arbcli.kernels.codec.decode_weight import decode_weight, decode_weight_triton
from arbcli.kernels.codec.packing import has_planes
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference, rounded_float32
from arbcli.verify.kernels.codec.packed import SPECIAL_WEIGHTS
from arbcli.verify.verification import Verification

decode_weight_verification = Verification(
    decode_weight, decode_digits_reference, shapes=((1, 11, 328),), changed=SPECIAL_WEIGHTS,
    triton=rounded_float32(decode_weight_triton),
    torch=rounded_float32(decode_digits_torch), native=rounded_float32(decode_digits_native),
    scale_path=has_planes,
    values={"packed": {"spread": 127}},
)  # fmt: skip

"""Verification of `arbcli.kernels.codec.decode_weight`."""

import torch

from arbcli.kernels.codec.decode_digits import (
    decode_digits_native,
    decode_digits_torch,
)
from arbcli.kernels.codec.decode_weight import (
    decode_weight,
    decode_weight_triton,
)
from arbcli.kernels.codec.packing import has_planes
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference, rounded_float32
from arbcli.verify.kernels.codec.packed import SPECIAL_WEIGHTS
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Verification

decode_weight_verification = Verification(
    decode_weight, decode_digits_reference, shapes=((1, 11, 328),), changed=SPECIAL_WEIGHTS,
    triton=rounded_float32(decode_weight_triton),
    torch=rounded_float32(decode_digits_torch), native=rounded_float32(decode_digits_native),
    scale_path=has_planes,
    timed=[
        Timed(f"{n}x{k}", N=n, K=k, dtype=torch.bfloat16) for n, k in ((8192, 8192), (2048, 5632))
    ],
    values={"packed": {"spread": 127}},
)  # fmt: skip

"""Verification of `arbcli.kernels.codec.decode_weight`."""

from collections.abc import Iterator

import torch

from arbcli.kernels.codec.decode_digits import (
    decode_digits_native,
    decode_digits_torch,
)
from arbcli.kernels.codec.decode_weight import (
    decode_weight,
    decode_weight_triton,
)
from arbcli.kernels.codec.layout import LARGEST_BYTE
from arbcli.kernels.codec.packing import has_planes
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference, rounded_float32
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, in_features in (
        (1, 1),
        (3, 33),
        (33, 123),
        (2, 165),
        (11, 328),
        (9, 1000),
        (1, 2720),
        (2, 1311),
    ):
        packed = random_packed(rows, in_features, group_size, generator).to(device)
        yield Case(f"{rows}x{in_features}", (packed,))
    yield Case("2x1311 whole octaves", (packed._replace(fraction=None),))
    packed = random_packed(6, 165, group_size, generator).to(device).rows(slice(1, None, 2))
    yield Case("3x165 strided", (packed,))
    assert packed.fraction is not None
    apart = torch.stack([packed.fraction, packed.fraction], dim=2)[:, :, 0]
    yield Case("3x165 fraction strided", (packed._replace(fraction=apart),))
    zeros = torch.full_like(packed.trits, LARGEST_BYTE // 2)
    yield Case("3x165 zeros", (packed._replace(trits=zeros),))


decode_weight_verification = Verification(
    decode_weight, decode_digits_reference, _cases, triton=rounded_float32(decode_weight_triton),
    torch=rounded_float32(decode_digits_torch), native=rounded_float32(decode_digits_native),
    scale_path=has_planes,
    timed=[
        Timed(f"{n}x{k}", N=n, K=k, dtype=torch.bfloat16) for n, k in ((8192, 8192), (2048, 5632))
    ],
    values={"packed": {"spread": 127}},
    long=("2x1311", "9x1000"),
)  # fmt: skip

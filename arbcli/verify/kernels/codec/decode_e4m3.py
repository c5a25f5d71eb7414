"""Verification of `arbcli.kernels.codec.decode_e4m3`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_e4m3 import (
    decode_e4m3,
)
from arbcli.kernels.codec.layout import BLOCK
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.verify.kernels.codec.decode_digits import add_remainders, decode_digits_reference
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.matmul.quantise_rows import codes_to_float32, round_e4m3_reference
from arbcli.verify.timed import MATRIX
from arbcli.verify.verification import Case, Timing, Verification, never


def decode_e4m3_reference(packed: Packed, transposed: bool) -> tuple[Tensor, Tensor]:
    """Compute `decode_e4m3`, with q in float32."""
    weight = decode_digits_reference(packed).double()
    weight = weight.T if transposed else weight
    octave = packed.exponent.max().double() - (7 if packed.remainder is None else 6)
    scale = torch.exp2(octave).expand(1, len(weight)).to(torch.float32)
    return round_e4m3_reference(weight * torch.exp2(-octave)), scale


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, in_features in ((1, 1), (3, 33), (65, 43), (2, 165), (12, 328), (4, 651)):
        packed = random_packed(rows, in_features, group_size, generator, spread=9).to(device)
        for transposed in (False, True):
            label = f"{rows}x{in_features}{' transposed' * transposed}"
            yield Case(label, (packed, transposed))
    packed = packed.rows(slice(None, None, 2))
    yield Case("2x651 strided", (packed, True))
    yield Case("whole octaves", (packed._replace(fraction=None), False))
    tall = random_packed(33, 7, group_size, generator, spread=9).to(device)
    for name, all_digits in add_remainders(tall, generator):
        yield Case(f"33x7 {name}", (all_digits, False))
    for name, all_digits in add_remainders(packed, generator):
        for transposed in (False, True):
            yield Case(f"2x651 {name}{' transposed' * transposed}", (all_digits, transposed))
    for end in (-96, 31):
        ends = packed._replace(exponent=torch.full_like(packed.exponent, end))
        yield Case(f"E = {end}", (ends, False))


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    packed = random_packed(*MATRIX, group_size, generator, spread=8)
    for transposed in (False, True):
        label = f"11264x2048{' transposed' * transposed}"
        yield Timing(label, (packed, transposed), run=decode_e4m3.triton)
    _, (name, all_digits) = add_remainders(packed, generator)
    for transposed in (False, True):
        label = f"11264x2048 {name}{' transposed' * transposed}"
        yield Timing(label, (all_digits, transposed), run=decode_e4m3.triton)


decode_e4m3_verification = Verification(
    decode_e4m3, decode_e4m3_reference, _cases, compared=codes_to_float32,
    scale_path=lambda group_size: (has_planes(group_size), BLOCK % group_size == 0),
    timings=_timings,
    values={"packed": {"spread": 12}, "transposed": (False, True), "largest": never},
    long=("12x328*", "4x651*", "65x43", "2x651*digits*transposed", "E = 31"),
)  # fmt: skip
